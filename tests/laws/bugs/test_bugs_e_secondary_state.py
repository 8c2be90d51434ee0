"""Cases E of reference/bugs.md: state beside the latents left behind on hits, eviction, preemption.

What these models have beside latents is index keys; windows, rings and host tiers come later.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.attention.layouts.plain import PlainLayout
from gnomon.cache.rules import Private, Window
from gnomon.cache.schema import CacheSchema, GroupSpec, PartSpec
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import EngineRequest
from tests.laws.bugs.engines import bug_core, cold_outputs, outputs, prompt, request, run, tokens


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    core.check_integrity()


def test_e8_hits_under_pressure_above_the_pool() -> None:
    """40 pages of 4, a prefix of 96, pressure of 200, resent twice: never a stale page."""
    core = bug_core(num_kv_pages=40, max_num_batched_tokens=128)
    prefix = prompt(96)
    asks = [request(f"a{i}", prefix + prompt(9, 50 + i), 4) for i in range(3)]
    pressure = [request(f"p{i}", prompt(100, 7 + i), 3) for i in range(2)]
    expected = cold_outputs(core, [*asks, *pressure])
    hits = []
    for turn in range(2):
        for ask in asks:
            deltas = run(core, [replace_id(ask, f"{ask.request_id}.{turn}")])
            (found,) = deltas.values()
            hits.append(found[-1].num_cached_tokens)
            assert tokens(found) == expected[ask.request_id]
        for ask in pressure:
            named = replace_id(ask, f"{ask.request_id}.{turn}")
            assert outputs(core, [named])[named.request_id] == expected[ask.request_id]
    assert hits[1::3] == hits[2::3] == [96] * 2  # within a turn; the pressure evicted the others
    assert core.stats().num_preemptions == 0
    assert_idle(core)


def test_e8_equal_pages_behind_other_pasts() -> None:
    """Pages A C and B D are cached; A D hits A alone, though D's tokens are in the cache."""
    core = bug_core()
    a, b, c, d = (prompt(8, 20 + i) for i in range(4))
    asks = [request(f"r{i}", [*parts, 5, 6], 10) for i, parts in enumerate((a + c, b + d, a + d))]
    expected = cold_outputs(core, asks)
    for ask in asks:
        deltas = run(core, [ask])[ask.request_id]
        assert tokens(deltas) == expected[ask.request_id]
    assert deltas[-1].num_cached_tokens == 8


def replace_id(ask: EngineRequest, name: str) -> EngineRequest:
    """The same request under another name."""
    return request(name, ask.prompt_token_ids, ask.params.max_tokens)


def test_e9_retracted_requests_end_as_they_would_have() -> None:
    """Six requests grow past the pool, so that several are retracted and computed anew."""
    asks = [request(f"r{i}", prompt(9 + i, i), 20) for i in range(6)]
    expected = cold_outputs(bug_core(), asks)
    core = bug_core(num_kv_pages=20, max_num_seqs=6)
    assert outputs(core, asks) == expected
    assert core.stats().num_preemptions >= 4
    assert_idle(core)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 9], ids=["queued", "prefill", "late", "decode"])
def test_e10_an_abort_gives_its_pages_back(num_steps: int) -> None:
    """Aborted while it waits, prefills in chunks, or decodes: the mate's tokens are unchanged."""
    mate = request("mate", prompt(30, 3), 16)
    expected = cold_outputs(bug_core(), [mate])
    core = bug_core(max_num_batched_tokens=16, max_num_seqs=2)
    core.add([request("gone", prompt(40, 1), 30), mate, request("queued", prompt(12, 2), 5)])
    found = []
    for _ in range(num_steps):
        found += core.step()
    for name in ("gone", "queued"):
        (delta,) = core.abort([name])
        assert delta.finish_reason == "abort"
    while core.has_work:
        found += core.step()
        core.check_integrity()
    assert tokens([d for d in found if d.request_id == "mate"]) == expected["mate"]
    assert_idle(core)
    assert outputs(core, [replace_id(mate, "again")])["again"] == expected["mate"]


@pytest.mark.parametrize("length", [5, 63, 64, 65])
@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_e11_a_repeated_prompt_hits_all_but_a_granule(kind: str, length: int) -> None:
    core = bug_core(kind)
    step = core.info.cache["prefix_step_tokens"]
    ask = [request(f"{i}", prompt(length), 4) for i in range(3)]
    found = [run(core, [one])[one.request_id] for one in ask]
    hits = [deltas[-1].num_cached_tokens for deltas in found]
    assert hits[0] == 0
    assert hits[1] == hits[2] >= length // step * step - step
    assert hits[1] > 0
    assert tokens(found[0]) == tokens(found[1]) == tokens(found[2])


def test_e12_the_granule_of_hits_is_told_at_start() -> None:
    """The step of the prefix cache is that of all groups together, and it is printed."""
    for block_size in (4, 16, 64):
        core = bug_core(block_size=block_size, num_kv_pages=8)
        assert core.info.cache["prefix_step_tokens"] == block_size
    part = PartSpec("a", PlainLayout(torch.float32, 4), 0)
    groups = (
        GroupSpec("tokens", (part,), page_size=64),
        GroupSpec("packed", (replace(part, name="b"),), page_size=24, tokens_per_entry=4),
    )
    schema = CacheSchema(groups)
    assert schema.prefix_step_tokens == 192
    assert schema.reusable_tokens(400) == 384


def test_e13_a_scratch_group_does_not_veto_hits() -> None:
    """95 tokens twice: at most one page anew; a private tail empty every 4 tokens allows that."""
    core = bug_core()
    first, second = (run(core, [request(n, prompt(95), 2)])[n] for n in ("a", "b"))
    assert first[-1].num_cached_tokens == 0
    assert second[-1].num_cached_tokens >= 95 - 4
    part = PartSpec("a", PlainLayout(torch.float32, 4), 0)

    def schema(tail: Private) -> CacheSchema:
        scratch = GroupSpec("tail", (replace(part, name="b"),), 4, sharing=tail)
        window = GroupSpec("window", (replace(part, name="c"),), 4, sharing=Window(16))
        return CacheSchema((GroupSpec("tokens", (part,), 4), scratch, window))

    assert schema(Private(4, empty_every=4)).prefix_step_tokens == 4
    assert schema(Private(4, empty_every=4)).reusable_tokens(95) == 92
    assert schema(Private(4)).prefix_step_tokens is None  # said at start, not found by its absence
