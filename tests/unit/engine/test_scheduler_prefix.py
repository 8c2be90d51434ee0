"""What requests share: cached prefixes, and the prompts of forks."""

from __future__ import annotations

from typing import Any

import pytest

from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.scheduler import SchedulerConfig
from tests.unit.engine.simulated_engine import SimulatedEngine, make_request

PAGE = 4
PROMPT = [(3 * i * i + i) % 10 for i in range(40)]
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def make_engine(num_pages: int = 65, **fields: Any) -> SimulatedEngine:
    limits = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return SimulatedEngine(SchedulerConfig(**{**limits, **fields}), {"tokens": (num_pages, PAGE)})


def add(engine: SimulatedEngine, name: str, prompt: list[int], **fields: Any) -> EngineRequest:
    request = make_request(name, prompt, params=fields.pop("params", SHORT), **fields)
    engine.add(request)
    return request


def finish(engine: SimulatedEngine) -> None:
    engine.finish_all()
    for name in engine.requests:
        engine.check_finished(name)


@pytest.mark.parametrize("shared", range(13))
@pytest.mark.parametrize("rest", [0, 1, 3])
def test_a_hit_takes_all_full_pages_but_leaves_a_token(shared: int, rest: int) -> None:
    engine = make_engine()
    add(engine, "cold", PROMPT[:shared] + [10] * 5)
    finish(engine)
    prompt = PROMPT[:shared] + [9] * rest
    if not prompt:
        return
    add(engine, "warm", prompt)
    finish(engine)
    # A page may hold the first tokens of the rest only if these agree too: they never do.
    expected = min(shared // PAGE, (len(prompt) - 1) // PAGE) * PAGE
    assert engine.num_cached["warm"] == expected
    stats = engine.scheduler.stats()
    assert (stats.prefix_hits, stats.prefix_queries) == (expected, shared + 5 + len(prompt))


def test_outputs_are_shared_as_prompts_of_the_next_turn() -> None:
    engine = make_engine()
    add(engine, "turn 1", PROMPT[:6], params=SamplingParams(max_tokens=9, ignore_eos=True))
    finish(engine)
    add(engine, "turn 2", PROMPT[:6] + engine.outputs["turn 1"] + [1])
    finish(engine)
    assert engine.num_cached["turn 2"] == 12  # 14 of its 15 tokens were in the cache


def test_the_same_prompt_twice_recomputes_at_most_a_page() -> None:
    engine = make_engine()
    for name in ("first", "second", "third"):
        add(engine, name, PROMPT[:39])
        finish(engine)
    assert engine.num_rows == 39 + 2 + 2 * (3 + 2)


def test_two_at_once_compute_apart_and_then_share() -> None:
    engine = make_engine()
    add(engine, "a", PROMPT[:16])
    add(engine, "b", PROMPT[:16])
    engine.begin()
    assert engine.pool.num_available == 64 - 8
    engine.end()
    assert engine.pool.num_available == 64 - 4  # "b" went over to the pages of "a"
    finish(engine)
    assert engine.num_cached == {"a": 0, "b": 0}
    engine.check_no_leak()


def test_nothing_is_shared_before_its_step_is_committed() -> None:
    engine = make_engine(max_prefill_chunk=8)
    add(engine, "a", PROMPT[:16])
    engine.begin()
    engine.begin()
    add(engine, "b", PROMPT[:16])
    engine.end()  # the first half of "a"
    engine.begin()
    finish(engine)
    assert engine.num_cached == {"a": 0, "b": 8}


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({"enable_prefix_cache": False}, {}),
        ({}, {"cache_salt": "other"}),
        ({}, {"params": SamplingParams(max_tokens=3, prompt_logprobs=1)}),
    ],
    ids=["off", "salt", "prompt_logprobs"],
)
def test_what_does_not_share(fields: dict[str, Any], other: dict[str, Any]) -> None:
    engine = make_engine(**fields)
    add(engine, "a", PROMPT)
    finish(engine)
    add(engine, "b", PROMPT, **other)
    finish(engine)
    assert engine.num_cached == {"a": 0, "b": 0}
    assert engine.scheduler.stats().prefix_hits == 0


def test_evicted_content_is_not_found() -> None:
    """A prefix, then more than the cache holds, then the prefix again (the simulator compares)."""
    engine = make_engine(num_pages=13)
    add(engine, "a", PROMPT)
    finish(engine)
    for number in range(3):
        add(engine, f"filler {number}", [number + 1] * 40)
        finish(engine)
    add(engine, "b", PROMPT)
    finish(engine)
    assert engine.num_cached["b"] == 0
    assert engine.pool.num_evictions > 20
    engine.check_no_leak()


def test_the_start_of_a_chain_outlives_its_end() -> None:
    engine = make_engine(num_pages=13)
    add(engine, "a", PROMPT)
    finish(engine)
    add(engine, "filler", [1] * 20)
    finish(engine)
    add(engine, "b", PROMPT)
    engine.step()
    assert engine.num_cached["b"] == 24  # of 12 pages the filler took the 6 youngest of the chain
    finish(engine)


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    engine = make_engine(num_pages=17, policy="priority", max_num_seqs=1)
    add(engine, "a", PROMPT[:20], priority=1)
    engine.step()
    add(engine, "b", [1] * 5, priority=0)
    finish(engine)
    assert engine.num_cached == {"a": 0, "b": 0}  # told of the first start
    stats = engine.scheduler.stats()
    assert (stats.num_preemptions, stats.prefix_queries) == (1, 25)
    # "a" again: of its 20 + 1 tokens 20 were cached.
    assert engine.num_rows == (20 + 1 + 1) + (5 + 2)


# ---------------------------------------------------------------- forks


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_forks_wait_and_then_share_the_prompt(enable_prefix_cache: bool) -> None:
    engine = make_engine(enable_prefix_cache=enable_prefix_cache, max_prefill_chunk=8)
    add(engine, "a", PROMPT[:18])
    for choice in (1, 2):
        add(engine, f"a{choice}", PROMPT[:18], fork_of="a", choice=choice)
    assert engine.scheduler.num_waiting == 3
    for _ in range(2):
        assert {item.request_id for item in engine.begin().items} == {"a"}
        engine.end()
    engine.begin()  # the last of the prompt: forks still wait
    assert engine.scheduler.num_waiting == 2
    engine.end()
    step = engine.begin()
    assert [(i.request_id, i.num_computed, i.num_new_tokens) for i in step.items] == [
        ("a", 18, 1),
        ("a1", 16, 2),
        ("a2", 16, 2),
    ]
    assert engine.pool.num_available == 64 - (4 + 3)  # 4 pages for all, a tail for each
    shared = {tuple(item.pages[0][:4]) for item in step.items}
    assert len(shared) == 1
    finish(engine)
    assert engine.num_cached == {"a": 0, "a1": 16, "a2": 16}
    engine.check_no_leak()


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_forks_of_a_parent_that_ends_at_once(enable_prefix_cache: bool) -> None:
    engine = make_engine(enable_prefix_cache=enable_prefix_cache)
    params = SamplingParams(max_tokens=1)
    add(engine, "a", PROMPT[:18], params=params)
    add(engine, "b", PROMPT[:18], params=params, fork_of="a", choice=1)
    finish(engine)
    assert engine.num_cached["b"] == (16 if enable_prefix_cache else 0)


def test_forks_of_a_parent_that_is_gone_run_alone() -> None:
    engine = make_engine()
    for name in ("b", "c", "d"):
        if name == "b":
            add(engine, "a", PROMPT[:18])
        add(engine, name, PROMPT[:18], fork_of="a")
    assert engine.scheduler.abort("c") is not None  # while it is held back
    assert engine.scheduler.abort("a") is not None
    add(engine, "e", PROMPT[:18], fork_of="a")
    engine.finish_all()
    for name in "bde":
        engine.check_finished(name)
    engine.check_no_leak()


def test_a_fork_does_not_take_the_pages_of_another_request_with_its_parents_id() -> None:
    engine = make_engine(enable_prefix_cache=False, max_num_seqs=1)
    add(engine, "a", PROMPT[:18])
    add(engine, "b", PROMPT[:18], fork_of="a")
    assert engine.scheduler.abort("a") is not None
    add(engine, "a", [1] * 18)
    finish(engine)
