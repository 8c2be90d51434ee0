"""Index lists: check() finds every broken rule, conversion never leaves a request's pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.geometry import build_geometry
from gnomon.attention.indices import (
    KeySet,
    ListSegment,
    RangeSegment,
    Space,
    causal_list,
    causal_range,
    owned_list,
    to_slots,
)
from gnomon.attention.ownership import KeyOwnership
from gnomon.attention.transforms import pad_rows
from gnomon.errors import GeometryError
from tests.unit.attention.steps import Step, geometry_of, steps, tokens_of


@st.composite
def listed_steps(draw: st.DrawFn) -> tuple[Step, list[list[int]], int]:
    """A step and, for each row, an ascending choice of the positions that it sees."""
    step = draw(steps())
    chosen = [
        sorted(draw(st.sets(st.integers(0, token[1]), max_size=8))) for token in step.tokens()
    ]
    return step, chosen, draw(st.integers(max((len(c) for c in chosen), default=0), 12))


def _segment(chosen: list[list[int]], width: int, dtype: torch.dtype = torch.int32) -> ListSegment:
    ids = torch.full((len(chosen), width), -1, dtype=dtype)
    for row, positions in enumerate(chosen):
        ids[row, : len(positions)] = torch.tensor(positions, dtype=dtype)
    count = torch.tensor([len(c) for c in chosen], dtype=torch.int32)
    return ListSegment("tokens", Space.POSITION, ids, count)


@given(listed_steps(), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_slots_are_those_of_the_rows_own_request(
    case: tuple[Step, list[list[int]], int], dtype: torch.dtype, validate: bool
) -> None:
    step, chosen, width = case
    geometry = geometry_of(step)
    segment = _segment(chosen, width, dtype)
    KeySet(geometry.rows, (segment,)).check()
    slots = to_slots(segment, geometry.rows, geometry.tables["tokens"], validate=validate)
    KeySet(geometry.rows, (slots,)).check()
    assert slots.space is Space.SLOT
    assert slots.ids.dtype == torch.int64
    for row, ((b, _), positions) in enumerate(zip(step.tokens(), chosen, strict=True)):
        expected = [step.slot((b, p)) for p in positions]
        assert slots.ids[row].tolist() == expected + [-1] * (width - len(expected))
    assert torch.equal(slots.count, segment.count)


@given(steps(), st.integers(1, 12), st.integers(0, 3))
def test_causal_sets_are_every_visible_position(step: Step, width: int, padding: int) -> None:
    axis = pad_rows(geometry_of(step), len(step.rows) + padding).rows
    segment = causal_list(axis, "tokens", width)
    KeySet(axis, (segment, causal_range(axis, "tokens"))).check()
    for row, token in enumerate(tokens_of(axis)):
        seen = [] if token is None else list(range(min(token[1] + 1, width)))
        assert segment.ids[row].tolist() == seen + [-1] * (width - len(seen))
        assert segment.count[row] == len(seen)
    compressed = causal_range(axis, "compressed", 4)
    KeySet(axis, (compressed,)).check({"compressed": 4})
    assert compressed.count.tolist() == [
        0 if t is None else (t[1] + 1) // 4 for t in tokens_of(axis)
    ]


@given(listed_steps(), st.integers(1, 4), st.integers(1, 5))
def test_owned_lists_partition_the_list(
    case: tuple[Step, list[list[int]], int], size: int, interleave: int
) -> None:
    step, chosen, width = case
    axis = geometry_of(step).rows
    segment = _segment(chosen, width)
    parts = [owned_list(segment, KeyOwnership(r, size, interleave)) for r in range(size)]
    for part in parts:
        KeySet(axis, (part,)).check()
    for row, positions in enumerate(chosen):
        held = [part.ids[row, : int(part.count[row])].tolist() for part in parts]
        for rank, mine in enumerate(held):
            assert mine == [p for p in positions if p // interleave % size == rank]
        assert sorted(p for mine in held for p in mine) == positions


def _axis_of_one() -> tuple[Step, list[list[int]]]:
    step = Step([2], [6], [[4, 2]], 4, [[1]])
    return step, [[0, 3, 4], [1, 2, 5]]


@pytest.mark.parametrize(
    ("ids", "count", "rule"),
    [
        ([[0, 3, 4, -1], [1, 2, 6, -1]], [3, 3], "at or past the entries the row sees: row 1"),
        ([[0, 3, 5, -1], [1, 2, 5, -1]], [3, 3], "at or past the entries the row sees: row 0"),
        ([[0, 3, 4, -1], [2, 1, 5, -1]], [3, 3], "do not ascend: row 1"),
        ([[0, 3, 3, -1], [1, 2, 5, -1]], [3, 3], "repeat or do not ascend: row 0"),
        ([[0, 3, 4, -1], [1, 2, 5, 0]], [3, 3], "ids after count are not -1: row 1"),
        ([[0, 3, -1, 4], [1, 2, 5, -1]], [4, 3], "a valid id is negative: row 0"),
        ([[0, 3, 4, -1], [1, 2, 5, -1]], [3, 5], "count outside 0..width: row 1"),
        ([[0, 3, 4, -1], [1, 2, 5, -1]], [3, -1], "count outside 0..width: row 1"),
    ],
)
def test_check_names_the_row_and_the_rule(
    ids: list[list[int]], count: list[int], rule: str
) -> None:
    step, _ = _axis_of_one()
    axis = geometry_of(step, "step 12").rows
    segment = ListSegment(
        "tokens",
        Space.POSITION,
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(count, dtype=torch.int32),
    )
    with pytest.raises(GeometryError, match=rf"'tokens' on 'step 12': .*{rule}"):
        KeySet(axis, (segment,)).check()


def test_check_reads_slots_ranges_and_padding() -> None:
    step, chosen = _axis_of_one()
    axis = pad_rows(geometry_of(step), 3).rows
    slots = replace(_segment([*chosen, []], 4), space=Space.SLOT)
    unsorted = replace(slots, ids=torch.tensor([[9, 3, 4, -1], [1, 2, 5, -1], [-1] * 4]))
    KeySet(axis, (unsorted,)).check()
    repeated = torch.tensor([[4, 3, 4, -1], [1, 2, 5, -1], [-1] * 4])
    with pytest.raises(GeometryError, match=r"repeat .* row 0"):
        KeySet(axis, (replace(slots, ids=repeated),)).check()
    with pytest.raises(GeometryError, match="a padding row has keys: row 2"):
        KeySet(axis, (_segment([*chosen, [0]], 4),)).check()
    zero = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(GeometryError, match=r"a range leaves the entries .* row 2"):
        KeySet(axis, (RangeSegment("tokens", zero, zero + 1),)).check()
    with pytest.raises(GeometryError, match=r"a range leaves the entries .* row 0"):
        KeySet(axis, (RangeSegment("tokens", zero - 1, zero + 1),)).check()


def test_ids_without_a_page_never_become_a_foreign_slot() -> None:
    geometry = build_geometry([1, 1], [6, 6], {"tokens": [[4, 2], [5, 6]]}, 4)
    table = replace(geometry.tables["tokens"])
    segment = _segment([[0, 5], [1, 40]], 3)
    with pytest.raises(GeometryError, match="an id has no page in table 'tokens': row 1"):
        to_slots(segment, geometry.rows, table)
    assert to_slots(segment, geometry.rows, table, validate=False).ids.tolist() == [
        [16, 9, -1],
        [21, -1, -1],
    ]


def test_bad_calls_name_what_is_allowed() -> None:
    step, chosen = _axis_of_one()
    geometry = geometry_of(step, "step 12")
    table, segment = geometry.tables["tokens"], _segment(chosen, 4)
    slots = to_slots(segment, geometry.rows, table)
    with pytest.raises(GeometryError, match=r"in slot space; only position lists"):
        to_slots(slots, geometry.rows, table)
    with pytest.raises(GeometryError, match="2 rows of ids, row axis 'step 12 > pad 3' has 3"):
        to_slots(segment, pad_rows(geometry, 3).rows, table)
    with pytest.raises(GeometryError, match=r"segment of 'tokens' has 2 rows, .* has 3"):
        KeySet(pad_rows(geometry, 3).rows, (segment,))
    with pytest.raises(GeometryError, match="by position, the list is in slot space"):
        owned_list(slots, KeyOwnership(0, 2))
    with pytest.raises(GeometryError, match="int32 or int64 of"):
        replace(segment, ids=segment.ids.float())
    with pytest.raises(GeometryError, match=r"count is torch.int64"):
        replace(segment, count=segment.count.long())
