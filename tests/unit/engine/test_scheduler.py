"""Scheduler, rule by rule: rows, order, chunks, and who gives way. No prefix cache here.

Right tokens and pages under everything at once are the business of test_scheduler_laws.py.
"""

from __future__ import annotations

import pytest

from gnomon.engine.sampling_params import SamplingParams
from tests.unit.engine.simulated_engine import add, next_rows, small_engine

# ---------------------------------------------------------------- rows and order


def test_prompts_are_cut_to_the_rows_of_a_step() -> None:
    engine = small_engine()
    add(engine, "a", 20)
    add(engine, "b", 20)
    assert next_rows(engine) == {"a": 16}
    assert next_rows(engine) == {"a": 4, "b": 12}
    assert next_rows(engine) == {"a": 1, "b": 8}
    assert next_rows(engine) == {"a": 1, "b": 1}


def test_prompts_are_cut_to_the_chunk() -> None:
    engine = small_engine(max_prefill_chunk=5)
    for name in "abcd":
        add(engine, name, 7)
    assert next_rows(engine) == {"a": 5, "b": 5, "c": 5, "d": 1}
    assert next_rows(engine) == {"a": 2, "b": 2, "c": 2, "d": 5}


def test_a_long_prompt_does_not_stop_those_behind_it() -> None:
    engine = small_engine(max_num_batched_tokens=8, policy="priority")
    add(engine, "low", 4, priority=2)
    engine.step()
    add(engine, "high", 30, priority=1)
    assert next_rows(engine) == {"low": 1, "high": 7}
    assert next_rows(engine) == {"high": 7, "low": 1}  # first in order now, but not alone


def test_only_the_last_row_of_all_tokens_is_sampled() -> None:
    engine = small_engine()
    add(engine, "a", 20)
    first, second = engine.begin(), None
    assert [item.needs_sample for item in first.items] == [False]
    assert engine.end() == []
    second = engine.begin()
    assert [(item.needs_sample, item.kv_len) for item in second.items] == [(True, 20)]
    assert len(engine.end()) == 1


def test_first_come_first_served_whatever_the_priority() -> None:
    engine = small_engine(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 1), ("c", 3)):
        add(engine, name, params=SamplingParams(max_tokens=1), priority=priority)
    assert [list(next_rows(engine)) for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_priority_then_arrival_then_order() -> None:
    engine = small_engine(max_num_seqs=1, policy="priority")
    for name, priority, arrival_s in (
        ("a", 2, 0.0),
        ("b", 1, 9.0),
        ("c", 1, 3.0),
        ("d", -1, 9.0),
        ("e", 1, 3.0),
    ):
        params = SamplingParams(max_tokens=1)
        add(engine, name, params=params, priority=priority, arrival_s=arrival_s)
    order = [next(iter(next_rows(engine))) for _ in range(5)]
    assert order == ["d", "c", "e", "b", "a"]


def test_seats_are_kept() -> None:
    engine = small_engine(max_num_seqs=2)
    for name in "abc":
        add(engine, name, 2, params=SamplingParams(max_tokens=2, ignore_eos=True))
    assert next_rows(engine) == {"a": 2, "b": 2}
    assert next_rows(engine) == {"a": 1, "b": 1}
    assert next_rows(engine) == {"c": 2}


# ---------------------------------------------------------------- who gives way


def test_the_youngest_gives_way_and_goes_on_later() -> None:
    engine = small_engine(num_pages=6)  # 5 pages of 4 tokens
    add(engine, "a", 8, params=SamplingParams(max_tokens=7, ignore_eos=True))
    add(engine, "b", 8, params=SamplingParams(max_tokens=7, ignore_eos=True))
    assert next_rows(engine) == {"a": 8, "b": 8}
    assert next_rows(engine) == {"a": 1}  # "a" took the last page, and "b" yields its two
    assert engine.scheduler.stats().num_preemptions == 1
    assert engine.scheduler.num_waiting == 1
    engine.finish_all()
    for name in "ab":
        engine.check_finished(name)
    engine.check_no_leak()


def test_the_first_in_order_is_never_pushed_out() -> None:
    engine = small_engine(num_pages=9)
    for name in "abcd":
        add(engine, name, 6, params=SamplingParams(max_tokens=26, ignore_eos=True))
    positions = []
    while "a" not in engine.endings:
        step = engine.begin()
        positions += [item.num_computed for item in step.items if item.request_id == "a"]
        engine.end()
    assert positions == [0, *range(6, 31)]
    engine.finish_all()
    for name in "abcd":
        engine.check_finished(name)


def test_a_start_leaves_the_reserve_free_unless_nobody_runs() -> None:
    engine = small_engine(num_pages=11, reserve=0.2)  # 2 of 10 pages
    add(engine, "a", 16)
    add(engine, "b", 20)
    engine.step()
    assert engine.step()[0].request_id == "a"
    assert engine.scheduler.num_waiting == 1  # 5 pages held and 5 wanted of 10, 2 reserved
    engine.scheduler.abort("a")
    assert next_rows(engine) == {"b": 16}
    engine.scheduler.abort("b")
    add(engine, "c", 40, params=SamplingParams(max_tokens=1))
    assert next_rows(engine) == {"c": 16}  # all 10 pages


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_higher_priority_takes_a_seat(policy: str) -> None:
    engine = small_engine(max_num_seqs=2, policy=policy)
    add(engine, "a", priority=1)
    add(engine, "b", priority=2)
    engine.step()
    add(engine, "c", priority=0)
    add(engine, "d", priority=1)  # not above "a", who is as high and came first
    assert next_rows(engine) == ({"a": 1, "c": 4} if policy == "priority" else {"a": 1, "b": 1})
    assert engine.scheduler.stats().num_preemptions == (policy == "priority")


def test_a_higher_priority_takes_pages() -> None:
    engine = small_engine(num_pages=9, policy="priority")
    add(engine, "a", 8, priority=1)
    add(engine, "b", 8, priority=2)
    engine.step()
    add(engine, "c", 15, priority=0)
    assert next_rows(engine) == {"a": 1, "c": 15}
    engine.finish_all()
    assert set(engine.endings) == {"a", "b", "c"}


def test_nobody_is_pushed_out_in_vain() -> None:
    engine = small_engine(num_pages=9, policy="priority")
    add(engine, "a", 16, priority=0)
    add(engine, "b", 4, priority=2)
    engine.step()
    engine.step()
    add(engine, "c", 16, priority=1)  # needs 4 pages; "a" holds 5 of 8, and "b" only 2
    assert next_rows(engine) == {"a": 1, "b": 1}
    assert engine.scheduler.stats().num_preemptions == 0
