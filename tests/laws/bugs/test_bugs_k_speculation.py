"""Cases K of reference/bugs.md: state of speculative decoding, as far as steps go without drafting.

Draft rows, verification and commit exist as transformations of a step (expand_drafts, advance);
the draft model and its place in the engine come later.
"""

from __future__ import annotations

import random

import pytest
import torch

from gnomon.attention.routes import DensePolicy, RoutePolicy
from gnomon.attention.transforms import advance, expand_drafts
from tests.laws.bugs.engines import bug_core, cold_outputs, prompt, request, tokens
from tests.laws.bugs.tiny import NEVER, Bench, Request, Token, rows_by_token, token_list

PROMPTS = {"a": 5, "b": 9, "c": 14}  # below topk, one past it, well past it


def written_positions(bench: Bench, one: Request, layer: int) -> list[int]:
    pool = bench.pools[f"layers.{layer}.index_key"]
    length = len(one.pages) * bench.page_size
    slots = torch.tensor([one.pages[p // 4] * 4 + p % 4 for p in range(length)])
    return pool.layout.gather(pool, slots).abs().sum(-1).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    "policy", [NEVER, RoutePolicy(DensePolicy.ALWAYS)], ids=["sparse", "dense"]
)
@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_k4_index_keys_are_written_also_where_nothing_is_selected(
    kind: str, policy: RoutePolicy
) -> None:
    """Short prompts need no top-k, dense rows no lists, drafts no commit: keys are there anyway."""
    bench = Bench(kind)
    one = bench.request("r", token_list(12))
    bench.step([(one, 6)], policy=policy)  # below topk
    bench.step([(one, 1)], policy=policy, change=lambda g: expand_drafts(g, 3))
    for layer in range(bench.config.num_hidden_layers):
        if bench.config.has_indexer(layer):
            assert written_positions(bench, one, layer) == list(range(10))


def test_k5_state_belongs_to_requests_not_to_rows() -> None:
    """Three requests; the first ends, the others move up in the batch and go on unchanged."""
    asks = [request(f"r{i}", prompt(12 + 5 * i, i), (3, 14, 20)[i]) for i in range(3)]
    sampled = [
        request(
            f"s{i}",
            prompt(9 + i, 40 + i),
            3 + 9 * i,
            temperature=1.0,
            seed=i,
            repetition_penalty=1.3,
        )
        for i in range(3)
    ]
    core = bug_core()
    expected = cold_outputs(core, [*asks, *sampled])
    core.add([*asks, *sampled])
    found: dict[str, list[int]] = {}
    while core.has_work:
        for delta in core.step():
            found.setdefault(delta.request_id, []).extend(tokens([delta]))
    assert found == expected


def plain_greedy(kind: str, num_new: int) -> tuple[dict[str, list[int]], Bench]:
    """Token by token, no drafts."""
    bench = Bench(kind)
    requests = [bench.request(name, token_list(n, n), room=40) for name, n in PROMPTS.items()]
    rows = bench.prefill(requests)
    for _ in range(num_new):
        for one in requests:
            one.tokens.append(bench.greedy(rows[one.name, one.done - 1]))
        rows = bench.step([(one, 1) for one in requests])
    return {one.name: one.tokens for one in requests}, bench


@pytest.fixture(scope="module", params=["T0", "T2"])
def truth(request: pytest.FixtureRequest) -> tuple[str, dict[str, list[int]]]:
    return request.param, plain_greedy(request.param, 24)[0]


def draft_tokens(quality: str, right: list[int], dice: random.Random) -> list[int]:
    """Drafts that are all right, all wrong, right once, or random."""
    wrong = [(token + 1 + dice.randrange(126)) % 128 for token in right]
    if quality == "all right":
        return right
    if quality == "one right":
        return right[:1] + wrong[1:]
    return (
        wrong
        if quality == "all wrong"
        else [dice.choice(p) for p in zip(right, wrong, strict=True)]
    )


@pytest.mark.parametrize("quality", ["all right", "all wrong", "one right", "random"])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_k8_drafts_of_any_quality_change_no_token(
    truth: tuple[str, dict[str, list[int]]], num_drafts: int, quality: str
) -> None:
    """Verify rows of three requests in one step; accepted counts differ; nothing rejected stays."""
    kind, expected = truth
    bench, dice = Bench(kind), random.Random(num_drafts)
    requests = [bench.request(name, token_list(n, n), room=40) for name, n in PROMPTS.items()]
    rows = bench.prefill(requests)
    lengths = {name: n + 18 for name, n in PROMPTS.items()}
    for one in requests:
        one.tokens.append(bench.greedy(rows[one.name, one.done - 1]))
    while any(one.done < lengths[one.name] for one in requests):
        for one in requests:  # the committed token, then drafts
            right = expected[one.name][one.done + 1 : one.done + 1 + num_drafts]
            del one.tokens[one.done + 1 :]
            one.tokens += draft_tokens(quality, right, dice)[:num_drafts]
        counts = [len(one.tokens) - one.done - 1 for one in requests]
        geometry = expand_drafts(bench.geometry([(one, 1) for one in requests]), counts)
        output = bench.forward(geometry, requests)
        verified: dict[Token, torch.Tensor] = rows_by_token(output.hidden, requests)
        accepted = []
        for one, count in zip(requests, counts, strict=True):
            kept = 1
            while kept <= count and one.tokens[one.done + kept] == bench.greedy(
                verified[one.name, one.done + kept - 1]
            ):
                kept += 1
            accepted.append(kept)
        advance(geometry, accepted).check()
        for one, kept in zip(requests, accepted, strict=True):
            one.done += kept
            del one.tokens[one.done :]
            one.tokens.append(bench.greedy(verified[one.name, one.done - 1]))
        if quality in ("all right", "all wrong"):
            assert accepted == [1 + (count if quality == "all right" else 0) for count in counts]
    for one in requests:
        length = min(len(one.tokens), len(expected[one.name]))
        assert one.tokens[:length] == expected[one.name][:length]
