"""Scheduler: what is refused, how requests end, and what a commit may bring."""

from __future__ import annotations

from typing import Any

import pytest

from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.scheduler import SchedulerConfig
from gnomon.errors import ConfigError, GnomonError, OverloadError, RequestError
from tests.unit.engine.simulated_engine import add, next_rows, rows, small_engine

# ---------------------------------------------------------------- refusals


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    engine = small_engine(num_pages=6)
    add(engine, "a", 8, params=SamplingParams(max_tokens=13))  # 20 cached tokens: all 5 pages
    with pytest.raises(RequestError, match=r"21 cached .* 6 pages of 4 .* has 5") as e:
        add(engine, "b", 8, params=SamplingParams(max_tokens=14))
    assert (e.value.param, e.value.code) == ("max_tokens", "cache_too_small")
    engine.finish_all()
    assert engine.outputs.keys() == {"a"}


def test_other_refusals() -> None:
    engine = small_engine()
    add(engine, "a", 63)
    with pytest.raises(RequestError, match="'a' is in use"):
        add(engine, "a", 1)
    with pytest.raises(RequestError, match="empty"):
        add(engine, "b", 0)
    with pytest.raises(RequestError, match=r"has 64 tokens, .* holds 64"):
        add(engine, "b", 64)
    with pytest.raises(RequestError, match="another prompt or cache_salt"):
        add(engine, "b", 63, fork_of="a")
    with pytest.raises(RequestError, match="another prompt or cache_salt"):
        add(engine, "a2", 63, fork_of="a", cache_salt="x")
    assert engine.scheduler.num_waiting == 1


def test_a_full_queue_is_refused_and_counted() -> None:
    engine = small_engine(max_queue=3, max_num_seqs=1, retry_after_s=2.5)
    for name in "abc":
        add(engine, name)
    with pytest.raises(OverloadError, match="3 requests are waiting and 1 more") as caught:
        add(engine, "d")
    assert caught.value.retry_after_s == 2.5
    engine.step()  # "a" runs
    engine.scheduler.require_room(1)
    with pytest.raises(OverloadError, match="2 requests are waiting and 2 more"):
        engine.scheduler.require_room(2)
    add(engine, "d")
    assert engine.scheduler.stats().rejected == 3


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_queue": 0}, "max_queue is 0"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "less than max_num_seqs"),
        ({"max_prefill_chunk": -1}, "max_prefill_chunk is -1"),
        ({"policy": "lifo"}, "policy is 'lifo'"),
        ({"reserve": 1.0}, "reserve is 1"),
    ],
)
def test_limits_under_which_nothing_runs_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SchedulerConfig(**{"max_model_len": 8, **fields})


# ---------------------------------------------------------------- endings


def test_abort_while_waiting_running_and_gone() -> None:
    engine = small_engine(max_num_seqs=1)
    add(engine, "a", 8)
    add(engine, "b", 8)
    engine.step()
    assert engine.scheduler.request_ids == ["a", "b"]
    for name in engine.scheduler.request_ids:
        delta = engine.scheduler.abort(name)
        assert delta is not None
        assert (delta.request_id, delta.finish_reason, delta.token_ids) == (name, "abort", [])
    assert engine.scheduler.abort("a") is None
    assert engine.scheduler.schedule().is_empty
    engine.check_no_leak()


def test_pages_of_an_aborted_request_come_back_when_its_step_is_over() -> None:
    engine = small_engine()
    add(engine, "a", 8)
    step = engine.begin()
    assert engine.scheduler.abort("a") is not None
    assert engine.pool.num_available == 62
    assert engine.scheduler.commit(step, {}) == []
    engine.check_no_leak()


def test_an_id_may_be_used_again_while_the_old_step_runs() -> None:
    engine = small_engine()
    add(engine, "a", 8)
    old = engine.scheduler.schedule()
    engine.scheduler.abort("a")
    add(engine, "a", 6)
    assert engine.scheduler.commit(old, {"a": [1]}) == []  # that token is nobody's
    step = engine.begin()
    assert (rows(step), step.released) == ({"a": 6}, ("a",))
    assert len(engine.end()) == 1


def test_released_ids_are_told_once() -> None:
    engine = small_engine()
    add(engine, "a", params=SamplingParams(max_tokens=1))
    add(engine, "b")
    engine.step()
    engine.scheduler.fail("b", "NaN")
    assert engine.scheduler.schedule().released == ("a", "b")
    assert engine.scheduler.schedule().released == ()


def test_a_failed_request_says_why_and_others_go_on() -> None:
    engine = small_engine()
    add(engine, "a")
    add(engine, "b")
    step = engine.begin()
    delta = engine.scheduler.fail("a", "NaN in layer 3")
    assert delta is not None
    assert (delta.finish_reason, delta.error) == ("error", "NaN in layer 3")
    assert [d.request_id for d in engine.end()] == ["b"]
    assert len(step.items) == 2


def test_a_commit_may_bring_several_tokens_and_cuts_behind_the_end() -> None:
    engine = small_engine()
    add(engine, "a", params=SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=[9]))
    scheduler = engine.scheduler
    (delta,) = scheduler.commit(scheduler.schedule(), {"a": [1, 2]})
    assert (delta.token_ids, delta.finish_reason) == ([1, 2], None)
    step = scheduler.schedule()
    assert [(item.num_computed, item.token_ids) for item in step.items] == [(4, [1, 2])]
    (delta,) = scheduler.commit(step, {"a": [9, 5]})
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ([9], "stop", 9)
    stats = scheduler.stats()
    assert (stats.generation_tokens, stats.prompt_tokens, stats.finished) == (3, 4, {"stop": 1})
    engine.check_no_leak()


def test_a_missing_token_is_a_fault_that_changes_nothing() -> None:
    engine = small_engine()
    add(engine, "a")
    step = engine.scheduler.schedule()
    for sampled in ({}, {"a": []}):
        with pytest.raises(GnomonError, match="samples a token for request 'a'"):
            engine.scheduler.commit(step, sampled)
    assert len(engine.scheduler.commit(step, {"a": [1]})) == 1
    with pytest.raises(GnomonError, match="step 1 retires"):
        engine.scheduler.commit(step, {"a": [1]})


def test_an_empty_step_needs_no_commit_and_does_no_harm() -> None:
    engine = small_engine()
    assert engine.scheduler.commit(engine.scheduler.schedule(), {}) == []
    add(engine, "a")
    engine.begin()
    waits = engine.scheduler.schedule()  # its next token is on its way
    assert waits.is_empty
    assert engine.scheduler.commit(waits, {}) == []
    assert engine.scheduler.fail_step(waits, "no") == []
    assert len(engine.end()) == 1


def test_overlapped_chunks_of_one_prompt() -> None:
    engine = small_engine()
    add(engine, "a", 40)
    assert [rows(engine.begin()) for _ in range(4)] == [{"a": 16}, {"a": 16}, {"a": 8}, {}]
    deltas = [engine.end() for _ in range(3)]
    assert [len(found) for found in deltas] == [0, 0, 1]


def test_thousands_that_wait_and_leave_do_not_pile_up() -> None:
    engine = small_engine(max_num_seqs=1, max_queue=10_000)
    add(engine, "running")
    engine.step()
    for number in range(5_000):
        add(engine, f"{number}", 1)
    for number in range(1, 5_000):
        engine.scheduler.abort(f"{number}")
    queue = engine.scheduler._queue
    assert len(queue) == 1
    assert len(queue._heap) < 200
    engine.scheduler.abort("running")
    assert next_rows(engine) == {"0": 1}
