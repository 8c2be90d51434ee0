"""Recording the choices of one batching and replaying them in another."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.geometry import RowAxis
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.ops.values import Selection
from gnomon.attention.step import AttentionStep
from gnomon.attention.taps import Recording, RecordingTap, ReplayTap
from gnomon.errors import GeometryError
from tests.unit.ops.build_step import SmallStep, operators, small_step


def choice_of(position: int, width: int) -> list[int]:
    """A list that only this position would choose: every second one below it."""
    return list(range(0, position + 1, 2))[-width:]


def selection(axis: RowAxis, width: int = 3, *, shift: int = 0) -> Selection:
    ids = torch.full((axis.num_rows, width), -1, dtype=torch.int32)
    count = torch.zeros(axis.num_rows, dtype=torch.int32)
    for row in axis.live_rows().tolist():
        chosen = choice_of(int(axis.position[row]) - shift, width)
        ids[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        count[row] = len(chosen)
    margin = axis.position.double() / 100
    keys = KeySet(axis, (ListSegment("tokens", Space.POSITION, ids, count),))
    return Selection(keys, margin, torch.zeros(axis.num_rows, dtype=torch.bool))


def record(steps: list[tuple[SmallStep, list[str]]]) -> Recording:
    tap = RecordingTap()
    for step, names in steps:
        axis = step.geometry.rows
        tap.begin_step(axis, names)
        chosen = selection(axis)
        assert tap.index(4, chosen) is chosen.keys
        experts = torch.stack((axis.position, axis.position + 1), 1).long()
        assert tap.experts(4, experts, axis.position.float()) is experts
    return tap.recording


def test_chunks_in_any_batch_record_what_a_whole_prompt_records() -> None:
    whole = record([(small_step([9], [9]), ["a"]), (small_step([6], [6]), ["b"])])
    chunks = record(
        [
            (small_step([2, 5], [2, 5], num_rows=10), ["b", "a"]),
            (small_step([4, 4], [9, 6]), ["a", "b"]),
        ]
    )
    for kept, other in (
        (whole.index, chunks.index),
        (whole.experts, chunks.experts),
        (whole.index_margin, chunks.index_margin),
        (whole.expert_margin, chunks.expert_margin),
    ):
        assert kept.keys() == other.keys() == {(4, "a"), (4, "b")}
        assert all(torch.equal(kept[key], other[key]) for key in kept)
    assert whole.index[4, "a"].tolist()[4] == [0, 2, 4]
    assert whole.index[4, "a"].tolist()[1] == [0, -1, -1]


def test_replay_gives_recorded_choices_in_another_batching() -> None:
    recording = record([(small_step([9], [9]), ["a"]), (small_step([6], [6]), ["b"])])
    step = small_step([2, 3], [6, 9], num_rows=8)
    axis = step.geometry.rows
    tap = ReplayTap(recording)
    tap.begin_step(axis, ["b", "a"])
    keys = tap.index(4, selection(axis, shift=1))
    keys.check()
    expected = selection(axis).keys.segments[0]
    found = keys.segments[0]
    assert isinstance(found, ListSegment)
    assert isinstance(expected, ListSegment)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.count, expected.count)
    own = torch.zeros(8, 2, dtype=torch.int64)
    experts = tap.experts(4, own, torch.zeros(8))
    assert experts[:5].tolist() == [[4, 5], [5, 6], [6, 7], [7, 8], [8, 9]]
    assert experts[5:].tolist() == [[-1, -1]] * 3


def test_replay_of_a_layer_that_was_not_recorded_keeps_its_own_choice() -> None:
    recording = record([(small_step([9], [9]), ["a"])])
    tap, axis = ReplayTap(recording), small_step([3], [3]).geometry.rows
    tap.begin_step(axis, ["a"])
    chosen = selection(axis)
    experts = torch.zeros(3, 2, dtype=torch.int64)
    assert tap.index(5, chosen) is chosen.keys
    assert tap.experts(5, experts, torch.zeros(3)) is experts


def test_replay_past_the_recording_or_of_a_stranger_is_an_error() -> None:
    recording = record([(small_step([4], [4]), ["a"])])
    for names, lengths in ((["a"], ([2], [5])), (["c"], ([2], [2]))):
        axis = small_step(*lengths).geometry.rows
        tap = ReplayTap(recording)
        tap.begin_step(axis, names)
        with pytest.raises(GeometryError, match=f"layer 4, request '{names[0]}'"):
            tap.index(4, selection(axis))


def test_a_tap_must_be_told_the_rows_first() -> None:
    with pytest.raises(GeometryError, match="begin_step"):
        RecordingTap().experts(0, torch.zeros(1, 1), torch.zeros(1))


def test_step_names_a_missing_pool() -> None:
    small = small_step([2], [2])
    step = AttentionStep(
        small.geometry, small.plan, {"layers.0.latent": small.latents}, operators()
    )
    assert step.pool("layers.0.latent") is small.latents
    with pytest.raises(GeometryError, match=r"'layers.1.latent'; this step has"):
        step.pool("layers.1.latent")
