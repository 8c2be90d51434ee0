"""EngineCore on a small random model: company, chunks, caches and preemption change no token."""

from __future__ import annotations

import math

import pytest
import torch

from gnomon.engine.core import EngineCore
from gnomon.engine.runner import Taps
from gnomon.errors import OverloadError, RequestError
from tests.engine.tiny_engine import VOCAB, outputs, prompt, request, run, tiny_core, tokens

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 90)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return tiny_core(check="full")


@pytest.fixture
def clean(core) -> EngineCore:
    """The shared engine without cached pages of the tests before."""
    core.reset_prefix_cache()
    return core


@pytest.fixture(scope="module")
def alone(core) -> dict[int, list[int]]:
    """The tokens of each prompt when it runs by itself."""
    found = {}
    for length in LENGTHS:
        core.reset_prefix_cache()
        found[length] = outputs(core, [request("a", prompt(length, length))])["a"]
    return found


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)


def test_tokens_are_different_enough_to_compare(alone):
    assert len({tuple(found) for found in alone.values()}) == len(LENGTHS)
    assert all(len(found) == 12 for found in alone.values())


@pytest.mark.parametrize("num_mates", [1, 7, 31])
def test_mates_change_nothing(clean, alone, num_mates):
    own = [request(f"own{length}", prompt(length, length)) for length in LENGTHS]
    mates = [
        request(f"mate{i}", prompt(3 + 5 * i % 70, 100 + i), 3 + i % 20, temperature=1.0, seed=i)
        for i in range(num_mates)
    ]
    found = outputs(clean, mates[: num_mates // 2] + own + mates[num_mates // 2 :])
    assert {length: found[f"own{length}"] for length in LENGTHS} == alone
    assert_idle(clean)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_nothing(alone, chunk):
    core = tiny_core(max_prefill_chunk=chunk)
    found = outputs(core, [request(str(n), prompt(n, n)) for n in LENGTHS])
    assert {length: found[str(length)] for length in LENGTHS} == alone


def test_shared_prefixes_of_every_residue_change_nothing(clean):
    """Prompts that share 32 + r tokens with a cached one: same tokens, and the pages are used."""
    base = prompt(64, 5)
    for residue in range(16):
        ids = base[: 32 + residue] + prompt(9, 60 + residue)
        clean.reset_prefix_cache()
        cold = run(clean, [request("cold", ids)])["cold"]
        clean.reset_prefix_cache()
        run(clean, [request("base", base)])
        warm = run(clean, [request("warm", ids)])["warm"]
        assert tokens(warm) == tokens(cold)
        assert cold[0].num_cached_tokens == 0
        assert warm[0].num_cached_tokens == 32
    salted = run(clean, [request("salted", base[:40], cache_salt="other")])["salted"]
    assert salted[0].num_cached_tokens == 0


def test_preemption_changes_nothing_with_just_enough_pages(alone):
    """Eight requests that need 39 pages at their ends share 11: several must give way."""
    core = tiny_core(num_kv_pages=12)
    for sampling in ({}, {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}):
        own = [request(str(n), prompt(n, n), 40, **sampling) for n in LENGTHS]
        roomy = outputs(tiny_core(), own)
        assert outputs(core, own) == roomy
        assert_idle(core)
    assert core.stats().num_preemptions > 0


def test_priority_inversion_changes_no_token():
    """An urgent late request pushes out others; everybody's tokens stay."""
    core = tiny_core(num_kv_pages=12, scheduling_policy="priority")
    slow = [request(f"slow{i}", prompt(40, i), 30, priority=5) for i in range(3)]
    urgent = request("urgent", prompt(70, 9), 10, priority=0)
    found = {one.request_id: [] for one in [*slow, urgent]}
    core.add(slow)
    order = []
    for _ in range(8):
        for delta in core.step():
            found[delta.request_id] += delta.token_ids
    core.add([urgent])
    while core.has_work:
        for delta in core.step():
            found[delta.request_id] += delta.token_ids
            order += [delta.request_id] if delta.finish_reason else []
    assert order[0] == "urgent"
    assert core.stats().num_preemptions > 0
    assert found == outputs(tiny_core(), [*slow, urgent])


def test_forks_share_the_prompt_and_differ_by_noise(clean):
    """Choices of one request: the prompt is computed once, each choice as if asked for alone."""
    ids = prompt(48, 3)

    def choices(names, fork_of):
        return [
            request(name, ids, temperature=1.5, seed=8, choice=i, fork_of=fork_of if i else None)
            for i, name in enumerate(names)
        ]

    together = run(clean, choices(["p", "q", "r"], "p"))
    found = [tokens(together[name]) for name in "pqr"]
    assert len({tuple(one) for one in found}) == 3
    assert [together[name][0].num_cached_tokens for name in "qr"] == [32, 32]
    clean.reset_prefix_cache()
    for i, one in enumerate(choices(["x", "y", "z"], None)):
        assert outputs(clean, [one])[one.request_id] == found[i]


def test_ends_by_eos_stop_id_length_and_context(clean, alone):
    first = alone[33]
    place = next(i for i in range(2, 12) if first[i] not in first[:i])
    cut = first[: place + 1]
    ids, end = prompt(33, 33), first[place]
    cases = {
        "eos": (request("eos", ids, eos_token_ids=(end,)), "stop", None, cut),
        "stop": (request("stop", ids, stop_token_ids=[end]), "stop", end, cut),
        "ignored": (
            request("ignored", ids, eos_token_ids=(end,), ignore_eos=True), "length", None, first
        ),
        "length": (request("length", ids, 3), "length", None, first[:3]),
    }  # fmt: skip
    found = run(clean, [case[0] for case in cases.values()])
    for name, (_, reason, stop_reason, expected) in cases.items():
        last = found[name][-1]
        assert tokens(found[name]) == expected
        assert (last.finish_reason, last.stop_reason) == (reason, stop_reason)
    held = clean.info.max_model_len
    full = run(clean, [request("full", prompt(held - 2, 1), 50)])["full"]
    assert len(tokens(full)) == 2
    assert full[-1].finish_reason == "length"


def test_min_tokens_bans_the_ends_until_then(clean, alone):
    end = alone[17][0]
    one = request("m", prompt(17, 17), eos_token_ids=(end,), min_tokens=4)
    found = outputs(clean, [one])["m"]
    assert end not in found[:4]
    assert len(found) >= 4


def test_aborted_requests_leave_no_page_and_disturb_nobody(clean, alone):
    own = [request(str(n), prompt(n, n)) for n in LENGTHS]
    gone = [request(f"gone{i}", prompt(50, 200 + i), 100) for i in range(5)]
    clean.add([*gone[:3], *own, *gone[3:]])
    found = {one.request_id: [] for one in own}
    for step in range(10_000):
        if not clean.has_work:
            break
        if step == 2:
            ended = clean.abort(["gone0", "gone3", "nobody"])
            assert [delta.finish_reason for delta in ended] == ["abort", "abort"]
        if step == 5:
            clean.abort(["gone1", "gone2", "gone4", "gone0"])
        for delta in clean.step():
            if delta.request_id in found:
                found[delta.request_id] += delta.token_ids
        clean.check_integrity()
    assert {length: found[str(length)] for length in LENGTHS} == alone
    assert_idle(clean)


def test_refused_requests_change_nothing(clean):
    for bad, param in (
        (request("r", []), "prompt"),
        (request("r", [VOCAB]), "prompt"),
        (request("r", [-1]), "prompt"),
        (request("r", prompt(clean.info.max_model_len)), "prompt"),
        (request("r", [1], logit_bias={VOCAB: 1.0}), "logit_bias"),
        (request("r", [1], stop_token_ids=[VOCAB]), "stop_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            clean.add([request("good", [1, 2]), bad])
        assert caught.value.param == param
        assert not clean.has_work
    with pytest.raises(RequestError, match="in use"):
        clean.add([request("twice", [1]), request("twice", [2])])
    assert not clean.has_work
    small = tiny_core(max_queue_size=1, max_num_seqs=1)
    with pytest.raises(OverloadError):
        small.add([request(str(i), [1]) for i in range(3)])
    assert not small.has_work
    assert small.stats().rejected == 3


def test_nan_fails_its_request_alone_and_leaves_no_trace(alone):
    """A token whose embedding is NaN: who uses it fails; mates, and users of its pages, do not."""
    core = tiny_core(num_kv_pages=24, max_model_len=128, max_prefill_chunk=16)
    core._parts.runner._model.embedding[VOCAB - 1] = math.nan
    for round_ in range(3):
        bad = prompt(60, 300 + round_)
        bad[[3, 30, 59][round_]] = VOCAB - 1
        found = run(core, [request("bad", bad), request("good", prompt(33, 33))])
        assert found["bad"][-1].finish_reason == "error"
        assert "NaN" in str(found["bad"][-1].error) or "nan" in str(found["bad"][-1].error)
        assert tokens(found["good"]) == alone[33]
        core.reset_prefix_cache()
        for length in (90, 64, 17):
            assert outputs(core, [request("x", prompt(length, length))])["x"] == alone[length]
        assert_idle(core)


class KeptLogits:
    """A LogitsTap that keeps everything."""

    wants_every_row = True

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], torch.Tensor] = {}

    def logits(self, request_ids, positions, logits) -> None:
        for name, position, row in zip(request_ids, positions, logits, strict=True):
            self.rows[name, position] = row.clone()


@pytest.mark.parametrize("chunk", [None, 5])
def test_prompt_logprobs_are_those_of_every_row(chunk):
    core = tiny_core(max_prefill_chunk=chunk)
    tap = KeptLogits()
    core.taps = Taps(logits=tap)
    ids = prompt(23, 2)
    run(core, [request("warm", ids)])
    scored = request("s", ids, 2, prompt_logprobs=2, logprobs=1)
    found = run(core, [request("mate", prompt(9, 1)), scored])["s"]
    kept = found[0].prompt_logprobs
    assert kept is not None
    assert (len(kept), kept[0]) == (23, None)
    assert all(delta.prompt_logprobs is None for delta in found[1:])
    assert found[0].num_cached_tokens == 0
    for position, entry in enumerate(kept[1:], start=1):
        expected = torch.log_softmax(tap.rows["s", position - 1].double(), -1)
        assert entry is not None
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(expected[ids[position]].item(), abs=1e-5)
        assert [token for token, _ in entry.top] == expected.topk(2).indices.tolist()
    single = run(core, [request("one", [7], 1, prompt_logprobs=2)])["one"]
    assert single[0].prompt_logprobs == [None]
    first = found[0].logprobs
    assert first is not None
    assert first[0].rank == 1
    assert first[0].token_id == tap.rows["s", 22].argmax().item()
