"""The sampler against plain loops in float64: filters, penalties, log-probabilities, failures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.engine import sampling_filters
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampler import Sampler, SampleRow
from gnomon.engine.sampling_noise import gumbels
from gnomon.engine.sampling_params import SamplingParams


def request(name="r", prompt=(1, 2, 3), choice=0, eos=(), **params) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
        choice=choice,
        eos_token_ids=tuple(eos),
    )


def kept_tokens(logits, params) -> tuple[list[int], list[float]]:
    """The filtered distribution by plain loops: token ids in order, their probabilities."""
    scaled = [float(x) / params.temperature for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    order = sorted(range(len(weights)), key=lambda token: (-float(logits[token]), token))
    if params.top_k > 0:
        order = order[: params.top_k]
    order = [token for token in order if weights[token] >= params.min_p]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += weights[token]
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
    return kept, [weights[token] / sum(weights[t] for t in kept) for token in kept]


def noise(seed, position, choice, num_tokens) -> list[float]:
    key = np.array([seed], np.uint64)
    return gumbels(key, np.array([position]), np.array([choice]), num_tokens)[0].tolist()


def picked(logits, params, numbers) -> int:
    """The winner of the race among the kept tokens, the lower id of equals."""
    kept, _ = kept_tokens(logits, params)
    scores = {token: logits[token] + params.temperature * numbers[token] for token in kept}
    return min(kept, key=lambda token: (-scores[token], token))


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 7, 30, 500]),
        "top_p": st.sampled_from([1.0, 0.99, 0.6, 0.1, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        "seed": st.integers(0, 2**20),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(SETTINGS, min_size=1, max_size=4),
    width=st.sampled_from([1, 3, 40]),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
    grain=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_draw_follows_the_filtered_distribution(rows, width, spread, grain, seed):
    """Every row draws what plain loops draw, however few leading tokens are looked at first."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 40, generator=generator) * spread
    if grain:
        logits = (logits / grain).round() * grain  # many exact ties
    original, sampling_filters.NUM_LEADING = sampling_filters.NUM_LEADING, width
    try:
        requests = [request(f"r{i}", **row) for i, row in enumerate(rows)]
        sampled = Sampler(0).sample(logits, [SampleRow(r, 3) for r in requests])
    finally:
        sampling_filters.NUM_LEADING = original
    for row, one in enumerate(requests):
        numbers = noise(one.params.seed, 3, 0, 40)
        assert sampled.token_ids[row] == picked(logits[row].tolist(), one.params, numbers)
    assert sampled.errors == (None,) * len(rows)


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {}], ids=str)
def test_frequencies_match_the_probabilities(filters):
    """Drawn at 20,000 positions, each token comes as often as its filtered probability says."""
    params = SamplingParams(temperature=0.8, seed=11, **filters)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.0, 0.5])
    kept, probabilities = kept_tokens(logits.tolist(), params)
    one = request(temperature=0.8, seed=11, **filters)
    num_draws = 20000
    rows = [SampleRow(one, position) for position in range(3, 3 + num_draws)]
    drawn = Sampler(0).sample(logits.expand(num_draws, -1).contiguous(), rows).token_ids
    counts = np.bincount(drawn, minlength=6)
    assert counts.sum() == counts[kept].sum()
    for token, probability in zip(kept, probabilities, strict=True):
        sigma = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token] - num_draws * probability) < 4.5 * sigma


def test_a_banned_token_is_never_drawn():
    """A logit of minus infinity loses against every other, whatever the noise."""
    logits = torch.full((200, 9), -math.inf)
    logits[:, 4] = -50.0
    rows = [SampleRow(request("r", temperature=2.0, seed=3), place) for place in range(200)]
    assert set(Sampler(0).sample(logits, rows).token_ids) == {4}


def test_filters_leave_the_noise_as_it_is():
    """Unless the winner is filtered out, the same seed gives the same token."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(4))
    for seed in range(40):
        free = request("free", temperature=1.0, seed=seed)
        held = request("held", temperature=1.0, seed=seed, top_k=20)
        row = [Sampler(0).sample(logits, [SampleRow(r, 3)]).token_ids[0] for r in (free, held)]
        best = kept_tokens(logits[0].tolist(), held.params)[0]
        assert row[1] in best
        assert row[0] == row[1] or row[0] not in best


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(3, 1000)
    logits[:, [17, 400, 900]] = 1.0
    logits[2, 5] = 1.5
    rows = [SampleRow(request(f"r{i}", temperature=0.0), 3) for i in range(3)]
    assert Sampler(0).sample(logits, rows).token_ids == (17, 17, 5)


def test_mates_and_order_change_nothing():
    """A row gets the token alone that it gets in a mixed batch, greedy mates included."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    requests = [
        request(f"r{i}", temperature=[0.0, 1.0][i % 2], seed=i, top_k=[0, 5][i % 2])
        for i in range(6)
    ]
    together = Sampler(0).sample(logits, [SampleRow(r, 9) for r in requests]).token_ids
    alone = [
        Sampler(0).sample(logits[i : i + 1], [SampleRow(requests[i], 9)]).token_ids[0]
        for i in range(6)
    ]
    assert list(together) == alone


def test_seeds_come_from_engine_and_request_when_none_is_given():
    logits = torch.zeros(1, 10000)

    def token(engine_seed, **key):
        one = request(**key)
        return Sampler(engine_seed).sample(logits, [SampleRow(one, 3)]).token_ids[0]

    assert token(0, name="a") == token(0, name="a")
    assert len({token(0, name="a"), token(1, name="a"), token(0, name="b")}) == 3
    assert token(0, name="a", choice=0) != token(0, name="a", choice=1)
    assert token(0, name="a", seed=5) == token(1, name="b", seed=5)


PENALTIES = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.75, -1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -0.25]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "logit_bias": st.sampled_from([None, {3: 2.5}, {0: -100.0, 7: 1.0, 5: 100.0}]),
        "min_tokens": st.sampled_from([0, 2, 5]),
    }
)


def edited(logits, prompt, outputs, params, banned) -> list[float]:
    """The edits of sampling_state's docstring by plain loops."""
    values = [float(x) for x in logits]
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in {*prompt, *outputs}:
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(outputs):
        values[token] -= params.frequency_penalty * outputs.count(token)
        values[token] -= params.presence_penalty
    if len(outputs) < params.min_tokens:
        for token in banned:
            values[token] = -math.inf
    return values


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(PENALTIES, min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_penalties_bias_and_bans_follow_plain_counts(rows, seed):
    """Six greedy steps with penalties pick what recounting everything each step picks."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [[1, 2, 2, 7], [4], [0, 3], [5, 5]]
    requests = [
        request(f"r{i}", prompts[i], eos=(6,), temperature=0.0, stop_token_ids=(2,), **row)
        for i, row in enumerate(rows)
    ]
    outputs: list[list[int]] = [[] for _ in rows]
    sampler = Sampler(0)
    for step in range(6):
        logits = torch.randn(len(rows), 9, generator=generator) * 2
        before = logits.clone()
        places = [SampleRow(one, len(one.prompt_token_ids) + step) for one in requests]
        sampled = sampler.sample(logits, places)
        assert torch.equal(logits, before)
        for row, one in enumerate(requests):
            values = edited(logits[row], prompts[row], outputs[row], one.params, (2, 6))
            best = max(values)
            assert values[sampled.token_ids[row]] >= best - 1e-5
            outputs[row].append(sampled.token_ids[row])


def test_logprobs_are_of_the_raw_distribution():
    """Neither bias nor temperature shows; ranks and the top list follow value, then id."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    rows = [
        SampleRow(request("a", temperature=0.0, logprobs=3, logit_bias={4: 50.0}), 3),
        SampleRow(request("b", temperature=0.0, logprobs=0), 3),
    ]
    first, second = Sampler(0).sample(logits, rows).logprobs
    log_mass = math.log(sum(math.exp(x) for x in (1.0, 3.0, 3.0, 0.0, 2.0)))
    assert first is not None
    assert first.token_id == 4
    assert first.rank == 3
    assert first.logprob == pytest.approx(2.0 - log_mass, abs=1e-6)
    assert [token for token, _ in first.top] == [1, 2, 4]
    assert [value for _, value in first.top] == pytest.approx(
        [3.0 - log_mass, 3.0 - log_mass, 2.0 - log_mass], abs=1e-6
    )
    assert second is not None
    assert (second.token_id, second.rank, second.top) == (0, 1, [])
    assert second.logprob == pytest.approx(-math.log(5), abs=1e-6)


def test_rows_without_a_likeliest_token_fail_alone():
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = math.nan
    logits[2, 0] = math.inf
    logits[3, :] = -math.inf
    requests = [request(f"r{i}", temperature=[0.0, 1.0][i % 2], logprobs=1) for i in range(5)]
    sampled = Sampler(0).sample(logits, [SampleRow(r, 3) for r in requests])
    assert [error is None for error in sampled.errors] == [True, False, False, False, True]
    assert [value is None for value in sampled.logprobs] == [False, True, True, True, False]
    healthy = Sampler(0).sample(logits[[0, 4]], [SampleRow(requests[i], 3) for i in (0, 4)])
    assert sampled.token_ids[0] == healthy.token_ids[0]
    assert sampled.token_ids[4] == healthy.token_ids[1]


def test_ended_requests_are_forgotten():
    sampler = Sampler(0)
    one = request(temperature=0.0, frequency_penalty=2.0)
    logits = torch.tensor([[1.0, 0.5, 0.0]])
    assert sampler.sample(logits, [SampleRow(one, 3)]).token_ids == (0,)
    assert sampler.sample(logits, [SampleRow(one, 4)]).token_ids == (1,)
    assert len(sampler) == 1
    sampler.drop("r")
    sampler.drop("never seen")
    assert len(sampler) == 0
    assert sampler.sample(logits, [SampleRow(one, 3)]).token_ids == (0,)
