"""A Geometry is right at birth, or it is an error that says what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from gnomon.attention.geometry import (
    Geometry,
    HostLengths,
    PageTable,
    RequestAxis,
    RowAxis,
    RowSpan,
    WriteSlots,
    build_geometry,
)
from gnomon.attention.ownership import KeyOwnership
from gnomon.errors import GeometryError
from tests.unit.attention.steps import Step, assert_same, geometry_of, steps


@given(steps())
def test_a_built_geometry_is_the_plain_step(step: Step) -> None:
    geometry = geometry_of(step)
    assert_same(geometry, step)
    assert geometry.rows.num_live == len(step.rows)
    assert geometry.rows.live_rows().tolist() == list(range(len(step.rows)))
    assert geometry.requests.host == HostLengths(tuple(step.query_len), tuple(step.kv_len))


@given(steps())
def test_host_spans_tell_the_rows_without_the_device(step: Step) -> None:
    request, position = geometry_of(step).rows.host_rows()
    assert list(zip(request.tolist(), position.tolist(), strict=True)) == step.rows


def test_page_tables_may_be_lists_arrays_or_tables() -> None:
    lists = build_geometry([2, 1], [5, 9], {"tokens": [[3, 4], [7, 1, 2]]}, 4)
    array = np.array([[3, 4, 0], [7, 1, 2]], dtype=np.int64)
    mixed = [np.array([3, 4], dtype=np.int32), [7, 1, 2]]
    for pages in (array, mixed, lists.tables["tokens"]):
        other = build_geometry([2, 1], [5, 9], {"tokens": pages}, 4)
        assert torch.equal(other.tables["tokens"].pages, lists.tables["tokens"].pages)
        assert other.writes["tokens"].slots.tolist() == [15, 16, 8]
    assert lists.writes["tokens"].slots.tolist() == [15, 16, 8]


def test_an_empty_step_is_legal() -> None:
    geometry = build_geometry([], [], {"tokens": []}, 4)
    geometry.check()
    assert geometry.rows.num_rows == geometry.requests.num_requests == 0


@pytest.mark.parametrize(
    ("query", "kv", "pages", "message"),
    [
        ([1], [1, 2], [[1]], "1 query lengths, 2 kv lengths"),
        ([3], [2], [[1]], "request 0: query_len 3, kv_len 2"),
        ([-1], [2], [[1]], "query_len -1"),
        ([1], [1], [[1], [2]], "pages for 2 requests, the step has 1"),
        ([1], [9], [[1, 2]], "page 2 is missing or null"),
        ([1], [8], [[1, 0]], "page 1 is missing or null"),
        ([0, 1], [9, 1], [[1, 2], [3]], "holds 8 tokens, but a request has 9"),
    ],
)
def test_bad_host_values_are_refused_at_birth(
    query: list[int], kv: list[int], pages: list[list[int]], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        build_geometry(query, kv, {"tokens": pages}, 4)


def test_a_huge_slot_does_not_wrap() -> None:
    page = 2**31 - 1
    geometry = build_geometry([1], [64], {"tokens": [[page]]}, 64)
    assert geometry.writes["tokens"].slots.tolist() == [page * 64 + 63]
    assert geometry.tables["tokens"].slots(torch.tensor(0), torch.tensor(63)).item() == (
        page * 64 + 63
    )


def test_slots_never_leave_a_request() -> None:
    table = PageTable("tokens", torch.tensor([[5, 6, 0], [7, 8, 9]], dtype=torch.int32), 4)
    request = torch.tensor([0, 0, 0, 0, 0, 1, 1, -1, -1])
    position = torch.tensor([7, 8, 11, 12, -1, 11, 12, 0, 5])
    assert table.slots(request, position).tolist() == [27, -1, -1, -1, -1, 39, -1, -1, -1]
    empty = PageTable("tokens", torch.zeros((2, 0), dtype=torch.int32), 4)
    assert empty.slots(request, position).tolist() == [-1] * 9


def _axis(**changes: object) -> RowAxis:
    fields: dict[str, object] = {
        "request": torch.tensor([0, 0, -1], dtype=torch.int32),
        "position": torch.tensor([3, 4, 0], dtype=torch.int32),
        "kv_len": torch.tensor([4, 5, 0], dtype=torch.int32),
        "num_live": 2,
        "spans": (RowSpan(0, 0, 2, 3),),
        "label": "step 12",
    }
    return RowAxis(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"position": torch.zeros(2, dtype=torch.int32)},
            r"position of row axis 'step 12' .*\(2,\)",
        ),
        ({"kv_len": torch.zeros(3, dtype=torch.int64)}, "kv_len .* torch.int64"),
        ({"num_live": 3}, "num_live is 3, its spans hold 2 rows"),
        ({"spans": (RowSpan(0, 2, 4, 3),)}, "end by row 3"),
        ({"spans": (RowSpan(0, 1, 2, 3), RowSpan(0, 0, 1, 3))}, "ascend"),
        ({"spans": (RowSpan(0, 0, 2, 3, 0),)}, "stride >= 1"),
        ({"spans": (RowSpan(-1, 0, 2, 3),)}, "request >= 0"),
        ({"rank_rows": (2, 2)}, "add up to 4"),
    ],
)
def test_a_bad_axis_is_refused_at_birth(changes: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        _axis(**changes)


def test_the_parts_of_a_geometry_must_fit() -> None:
    good = build_geometry([2, 1], [5, 9], {"tokens": [[3, 4], [7, 1, 2]]}, 4)
    table = good.tables["tokens"]
    with pytest.raises(GeometryError, match="of group 'tokens'"):
        replace(good, tables={"other": table})
    with pytest.raises(GeometryError, match="needs its table"):
        replace(good, tables={})
    with pytest.raises(GeometryError, match="does not fit its 2 requests"):
        replace(good, rows=_axis(spans=(RowSpan(2, 0, 2, 3),)))
    with pytest.raises(GeometryError, match="does not fit"):
        replace(good, rows=_axis(spans=(RowSpan(0, 0, 2, 4),)))
    with pytest.raises(GeometryError, match="one slot for each of the 3 rows"):
        WriteSlots(good.rows, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(GeometryError, match=r"torch\.int32"):
        WriteSlots(good.rows, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(GeometryError, match="3 rows, but the ranks"):
        WriteSlots(good.rows, good.writes["tokens"].slots, good.rows)
    with pytest.raises(GeometryError, match="page_size 0"):
        replace(table, page_size=0)
    with pytest.raises(GeometryError, match=r"torch.int64 \(2, 3\)"):
        replace(table, pages=table.pages.long())


def _with_rows(geometry: Geometry, **changes: torch.Tensor) -> Geometry:
    rows = replace(geometry.rows, **changes)
    writes = {group: WriteSlots(rows, w.slots) for group, w in geometry.writes.items()}
    return replace(geometry, rows=rows, writes=writes)


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_check_finds_device_values_that_break_the_contract() -> None:
    good = build_geometry([2, 1], [5, 9], {"tokens": [[3, 4], [7, 1, 2]]}, 4)
    good.check({"tokens": 8})
    requests, table = good.requests, good.tables["tokens"]
    slots = good.writes["tokens"].slots
    wrong = [
        (_with_rows(good, request=_int32([0, 2, 1])), "I10: request out of range: row 1"),
        (_with_rows(good, request=_int32([0, -2, 1])), "I10: request out of range: row 1"),
        (_with_rows(good, request=_int32([0, -1, 1])), "I3: a padding row.* row 1"),
        (_with_rows(good, kv_len=_int32([4, 4, 9])), "I1: kv_len .* row 1"),
        (
            _with_rows(good, position=_int32([3, 2, 8]), kv_len=_int32([4, 3, 9])),
            "I12: position outside the tokens .* row 1",
        ),
        (
            _with_rows(good, position=_int32([4, 3, 8]), kv_len=_int32([5, 4, 9])),
            "I12: position differs from the host span: row 0",
        ),
        (_with_rows(good, request=_int32([1, 0, 1])), "I12|I10"),
        (
            replace(good, requests=RequestAxis(_int32([2, 1]), _int32([5, 8]), requests.host)),
            "I12: request 1 has kv_len 8 on the device; allowed is the host twin, 9",
        ),
        (
            replace(
                good,
                tables={"tokens": replace(table, pages=_int32([0, 4, 0, 7, 1, 2]).view(2, 3))},
            ),
            "I6: table 'tokens': request 0 has kv_len 5 and a null page",
        ),
        (
            replace(good, writes={"tokens": WriteSlots(good.rows, slots + 1)}),
            "I8: group 'tokens': row 0 .* writes slot 16, its page table says 15",
        ),
    ]
    for geometry, message in wrong:
        with pytest.raises(GeometryError, match=message):
            geometry.check()
    with pytest.raises(GeometryError, match=r"request 1: a page outside 0..6"):
        good.check({"tokens": 7})


def test_check_finds_a_token_or_a_slot_that_occurs_twice() -> None:
    shared = build_geometry([1, 1], [5, 5], {"tokens": [[3, 4], [3, 4]]}, 4)
    with pytest.raises(GeometryError, match="two rows of 'step' write one slot"):
        shared.check()
    good = build_geometry([2], [5], {"tokens": [[3, 4]]}, 4)
    twice = _with_rows(good, position=_int32([4, 4]), kv_len=_int32([5, 5]))
    rows = replace(
        twice.rows, spans=(RowSpan(0, 0, 1, 4), RowSpan(0, 1, 2, 4))
    )  # the host twins agree: the rule itself must catch it
    with pytest.raises(GeometryError, match="I10: two rows are the same token"):
        replace(twice, rows=rows, writes={}).check()


def test_shared_prefix_pages_are_no_fault() -> None:
    build_geometry([1, 2], [5, 6], {"tokens": [[3, 4], [3, 5]]}, 4).check()


def test_a_window_group_may_drop_the_pages_before_its_window() -> None:
    pages = torch.tensor([[0, 0, 5, 6]], dtype=torch.int32)
    window = PageTable("window", pages, page_size=4, window=5)
    build_geometry([2], [15], {"window": window}).check()  # rows 13, 14 see tokens 9..14
    with pytest.raises(GeometryError, match="null page"):
        build_geometry([4], [15], {"window": window}).check()  # row 11 sees token 7, page 1


def test_a_rank_writes_only_the_stripes_that_it_owns() -> None:
    slots = []
    for rank in range(2):
        pages = torch.tensor([[rank + 1, rank + 3]], dtype=torch.int32)
        table = PageTable("tokens", pages, 2, ownership=KeyOwnership(rank, 2, interleave=2))
        geometry = build_geometry([7], [7], {"tokens": table})
        geometry.check()
        slots.append(geometry.writes["tokens"].slots.tolist())
    assert slots == [[2, 3, -1, -1, 6, 7, -1], [-1, -1, 4, 5, -1, -1, 8]]
