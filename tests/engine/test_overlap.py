"""Overlapped steps = steps one after another: tokens, ends, pages; with and without graphs.

The oracle is the engine that lands every step before it begins the next (float64: equal tokens mean
equal computation). What ends a request is known one step late, and must cost nothing but a row.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.engine.assembly import survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import OutputDelta
from gnomon.engine.runner import Taps
from gnomon.errors import ConfigError
from tests.engine.graph_engine import graph_core
from tests.engine.test_graphs import mixed_requests
from tests.engine.tiny_engine import MODEL, outputs, prompt, request, run, tokens


def both(requests: list, **flags: Any) -> tuple[dict, dict]:
    """Deltas by request, overlapped and not."""
    return (
        run(graph_core(overlap="on", **flags), requests),
        run(graph_core(overlap="off", **flags), requests),
    )


def summary(deltas: dict[str, list[OutputDelta]]) -> dict[str, Any]:
    """Tokens and ends, without the steps at which they came."""
    return {
        name: (tokens(found), found[-1].finish_reason, found[-1].stop_reason)
        for name, found in deltas.items()
    }


@pytest.mark.parametrize("has_graphs", [True, False])
def test_the_tokens_are_the_same(has_graphs):
    overlapped, plain = both(mixed_requests(), has_graphs=has_graphs)
    assert summary(overlapped) == summary(plain)


def test_requests_that_are_pushed_out_with_tokens_in_flight_lose_none():
    requests = [request(f"r{i}", prompt(30, i), 40) for i in range(4)]
    core = graph_core(overlap="on", num_kv_pages=15, enable_prefix_caching=False)
    expected = outputs(graph_core(overlap="off"), requests)
    assert outputs(core, requests) == expected
    assert core.stats().num_preemptions > 0


def test_a_stop_token_ends_the_request_there_and_gives_its_pages_back():
    probe = outputs(graph_core(overlap="off"), [request("a", prompt(30), 12)])["a"]
    stopped = request("a", prompt(30), 12, stop_token_ids=[probe[5]])
    other = request("b", prompt(50, 1), 20, eos_token_ids=(probe[2],))
    core = graph_core(overlap="on")
    found = run(core, [stopped, other])
    first = probe.index(probe[5])
    assert tokens(found["a"]) == probe[: first + 1]
    assert found["a"][-1].stop_reason == probe[5]
    assert not core.has_work
    core.check_integrity()
    assert core._parts.scheduler.pages.usage == 0.0


def test_steps_do_run_ahead():
    """While a decode step is in flight the next one is scheduled, on a token nobody has seen."""
    core = graph_core(overlap="on")
    core.add([request("a", prompt(9), 6)])
    assert core.step() == []  # launched, not landed
    deltas = core.step()
    assert len(tokens(deltas)) == 1
    (item,) = core._in_flight.schedule.items
    assert item.is_ahead
    assert item.token_ids == [0]


def test_nothing_is_computed_behind_the_last_token():
    core = graph_core(overlap="on")
    outputs(core, [request("a", prompt(9), 6)])
    assert core.stats().num_steps == 6  # the prompt's, and five rows: the last token is not fed


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_an_abort_in_between_harms_nobody(after):
    core = graph_core(overlap="on")
    expected = outputs(graph_core(overlap="off"), [request("b", prompt(41, 1), 12)])["b"]
    core.add([request("a", prompt(30), 30), request("b", prompt(41, 1), 12)])
    found: list[OutputDelta] = []
    for step in range(100):
        if step == after:
            (ended,) = core.abort(["a"])
            assert ended.finish_reason == "abort"
            core.add([request("a", prompt(7, 3), 3)])  # its id is free again
        if not core.has_work:
            break
        found += core.step()
        core.check_integrity()
    assert tokens([delta for delta in found if delta.request_id == "b"]) == expected
    again = outputs(graph_core(overlap="off"), [request("a", prompt(7, 3), 3)])["a"]
    assert tokens([delta for delta in found if delta.request_id == "a"])[-3:] == again


def test_log_probabilities_are_those_of_their_own_step():
    requests = [request("a", prompt(30), 8, logprobs=3), request("b", prompt(50, 1), 12)]
    overlapped, plain = both(requests)
    for name in ("a", "b"):
        assert tokens(overlapped[name]) == tokens(plain[name])
    ours, theirs = (
        [one for delta in found["a"] for one in delta.logprobs] for found in (overlapped, plain)
    )
    assert [one.token_id for one in ours] == [one.token_id for one in theirs]
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs])


def test_a_poisoned_request_fails_alone_and_one_step_late():
    core = graph_core(overlap="on")
    core.add([request(name, prompt(20, i), 6) for i, name in enumerate(("good", "bad", "fine"))])
    core.step()
    core.step()
    (victim,) = [state for state in core._parts.scheduler._running if state.request_id == "bad"]
    core._parts.cache.poison("tokens", [int(victim.table.views[0][0])])
    found: dict[str, list[OutputDelta]] = {}
    while core.has_work:
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)
        core.check_integrity()
    assert found["bad"][-1].finish_reason == "error"
    assert {found[name][-1].finish_reason for name in ("good", "fine")} == {"length"}


@pytest.mark.parametrize("part", ["builder.build", "runner.run", "sampler.launch"])
def test_an_error_ends_both_steps_and_the_engine_stays_consistent(part):
    core = graph_core(overlap="on")
    core.add([request("a", prompt(30), 9), request("b", prompt(8, 1), 9)])
    core.step()
    owner = getattr(core._parts, part.partition(".")[0])
    name = part.partition(".")[2]
    works = getattr(owner, name)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    setattr(owner, name, fails)
    with pytest.raises(RuntimeError, match="planted") as caught:
        core.step()
    assert "in step 1 or 2" in caught.value.__notes__[0]
    setattr(owner, name, works)
    core.check_integrity()
    assert not core.has_work
    assert len(outputs(core, [request("c", prompt(5), 3)])["c"]) == 3


def test_steps_wait_for_each_other_while_somebody_listens():
    class Tap:
        wants_every_row = False

        def __init__(self) -> None:
            self.positions: list[int] = []

        def logits(self, request_ids, positions, logits):
            self.positions += positions

    core, tap = graph_core(overlap="on"), Tap()
    core.add([request("a", prompt(5), 8)])
    for _ in range(3):
        core.step()
    core.taps = Taps(logits=tap)
    found: list[OutputDelta] = []
    while core.has_work:
        found += core.step()
    assert tap.positions == sorted(set(tap.positions))
    assert len(tap.positions) == 5


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 90),  # prompt length
            st.integers(1, 10),  # new tokens
            st.sampled_from([{}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 0.5}]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([20, 64]),
    st.booleans(),
)
def test_any_mix_gives_the_same_tokens(kinds, max_num_batched_tokens, enable_prefix_caching):
    requests = [
        request(f"r{i}", prompt(length, i % 2), new, **extra)
        for i, (length, new, extra) in enumerate(kinds)
    ]
    flags = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
        "num_kv_pages": 24,
        "max_num_seqs": 4,
    }
    cores: list[EngineCore] = [graph_core(overlap=mode, **flags) for mode in ("on", "off")]
    assert outputs(cores[0], requests) == outputs(cores[1], requests)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"record": "x"}, "with record each"),
        ({"shadow": 0.5, "check": "full"}, "with shadow and check each"),
    ],
)
def test_overlap_that_could_only_be_ignored_is_refused_before_weights(flags, named):
    with pytest.raises(ConfigError, match=f"overlap is 'on', but {named}"):
        survey(EngineConfig.of(model=MODEL, overlap="on", **flags))
    survey(EngineConfig.of(model=MODEL, overlap="auto", **flags))
