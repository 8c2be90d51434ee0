"""Traces of the engine: every row, every choice, whatever the way; and replaying them."""

from __future__ import annotations

import pytest
import torch

from gnomon.engine.core import EngineCore
from gnomon.errors import GnomonError
from gnomon.verify.trace import Replay, Staging, drive, recording_of, with_causal_lists
from tests.engine.tiny_engine import prompt, request, tiny_core

K = 16


@pytest.fixture
def core() -> EngineCore:
    return tiny_core()


def test_rows_tokens_and_logits(core: EngineCore) -> None:
    trace = drive(core, [request("a", prompt(40), 5)])["a"]
    assert trace.tokens[:40] == tuple(prompt(40))
    assert len(trace.output) == 5
    assert trace.logits.shape == (44, 512)
    assert bool(trace.is_computed.all())
    assert tuple(trace.logits[39:].argmax(-1).tolist()) == trace.output


def test_lists_of_every_row(core: EngineCore) -> None:
    trace = drive(core, [request("a", prompt(40), 5)])["a"]
    assert sorted(trace.keys) == [0, 1]
    for keys in trace.keys.values():
        for row, ids in enumerate(keys.tolist()):
            listed = [position for position in ids if position >= 0]
            assert len(listed) == min(row + 1, K)
            assert listed == sorted(set(listed))
            assert listed[-1] <= row
    assert bool((trace.key_margin[0][:K] == torch.inf).all())
    assert bool((trace.key_margin[0][K:] < torch.inf).all())


def test_dense_rows_are_counted_and_listed() -> None:
    core = tiny_core(dense_route="always_when_allowed", max_prefill_chunk=8)
    trace = drive(core, [request("a", prompt(20), 4)])["a"]
    assert trace.num_dense_rows == 16
    assert trace.keys[0][10].tolist() == [*range(11), *[-1] * 5]
    core = tiny_core(dense_route="never")
    assert drive(core, [request("a", prompt(20), 4)])["a"].num_dense_rows == 0


def test_rows_from_the_prefix_cache_were_not_computed(core: EngineCore) -> None:
    drive(core, [request("a", prompt(40), 2)])
    trace = drive(core, [request("b", [*prompt(40)[:36], 1, 2], 3)])["b"]
    assert trace.num_cached == 32
    assert trace.is_computed.tolist() == [False] * 32 + [True] * 8


def test_requests_come_when_they_are_said_to(core: EngineCore) -> None:
    requests = [request("late", prompt(5), 3), request("early", prompt(9), 12)]
    seen: list[int] = []
    step = core.step

    def counted() -> list[object]:
        seen.append(core.stats().running + core.stats().waiting)
        return list(step())

    core.step = counted  # type: ignore[method-assign, assignment]
    drive(core, requests, Staging({"late": 4}))
    assert seen[:4] == [1, 1, 1, 1]
    assert seen[4] == 2


def test_a_request_that_comes_after_all_have_ended(core: EngineCore) -> None:
    found = drive(core, [request("a", prompt(5), 2)], Staging({"a": 100}))
    assert len(found["a"].output) == 2


def test_replaying_other_choices_changes_the_answer(core: EngineCore) -> None:
    own = drive(core, [request("a", prompt(60), 4)])["a"]
    other = drive(core, [request("a", prompt(60, salt=1), 4)])["a"]
    core.reset_prefix_cache()
    same = drive(
        core, [request("a", prompt(60), 4)], Staging(replay=Replay(recording_of({"a": own})))
    )
    core.reset_prefix_cache()
    recording = recording_of({"a": other})
    changed = drive(core, [request("a", prompt(60), 4)], Staging(replay=Replay(recording)))
    assert torch.allclose(same["a"].logits, own.logits, atol=1e-5)
    assert not torch.allclose(changed["a"].logits, own.logits, atol=0.1)


def test_a_dense_run_can_be_replayed_where_all_is_sparse() -> None:
    dense = drive(tiny_core(), [request("a", prompt(10), 1), request("b", prompt(30), 2)])
    assert not dense["a"].keys
    core = tiny_core(dense_route="never")
    requests = [request("a", prompt(10), 1), request("b", prompt(30), 2)]
    found = drive(core, requests, Staging(replay=Replay(recording_of(dense))))
    assert torch.allclose(found["a"].logits, dense["a"].logits, atol=1e-5)


def test_taps_are_taken_off(core: EngineCore) -> None:
    drive(core, [request("a", prompt(5), 2)])
    assert core.taps is None
    with pytest.raises(GnomonError):
        drive(core, [request("a", [], 2)])
    assert core.taps is None


def test_causal_lists_fill_empty_rows_that_see_few_keys_only() -> None:
    ids = torch.full((5, 3), -1, dtype=torch.int32)
    ids[1] = torch.tensor([1, -1, -1])
    filled = with_causal_lists(ids)
    assert filled.tolist() == [[0, -1, -1], [1, -1, -1], [0, 1, 2], [-1] * 3, [-1] * 3]
