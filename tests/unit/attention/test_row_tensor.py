"""A value of one axis is never taken for a value of another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.geometry import RowAxis, RowSubset, RowTensor, rehome, require_axis
from gnomon.attention.transforms import advance, expand_drafts, pad_rows, select
from gnomon.errors import GeometryError
from tests.unit.attention.steps import Step, geometry_of, steps


def _named(axis: RowAxis) -> RowTensor:
    """A value that says whose it is: 1 + request * 1000 + position; 0 on padding rows."""
    label = 1 + axis.request.long() * 1000 + axis.position
    return RowTensor(axis, torch.where(axis.is_live(), label, 0)[:, None].repeat(1, 2))


def _step() -> Step:
    step = Step([3, 4], [3, 9], [[1], [2, 3, 4]], 4, [[1], [2, 3]])
    step.rows = list(step.tokens())
    return step


def test_an_operator_refuses_a_tensor_of_another_axis_by_both_names() -> None:
    geometry = geometry_of(_step(), "step 12")
    padded = pad_rows(geometry, 20)
    twin = geometry_of(_step(), "step 13")
    query = _named(padded.rows)
    require_axis(padded.rows, query=query)
    for other in (geometry, twin):
        with pytest.raises(
            GeometryError,
            match=rf"query is on row axis 'step 12 > pad 20' \(20 rows\), but '{other.rows.label}'",
        ):
            require_axis(other.rows, query=query)
    with pytest.raises(GeometryError, match=r"shape \(19, 2\) was put on row axis .* 20 rows"):
        RowTensor(padded.rows, query.data[:19])
    with pytest.raises(GeometryError, match=r"shape \(\)"):
        RowTensor(padded.rows, torch.tensor(1.0))


@given(steps(), st.data())
def test_rehome_there_and_back_is_the_value(step: Step, data: st.DataObject) -> None:
    whole = pad_rows(geometry_of(step), len(step.rows) + 3)
    order = data.draw(st.permutations(range(len(step.rows))))
    chosen = list(order[: data.draw(st.integers(0, len(order)))])
    part = pad_rows(select(whole, chosen), len(chosen) + 2)
    value = _named(whole.rows)
    there = rehome(value, part.rows, [*chosen, -1, -1])
    assert torch.equal(there.data, _named(part.rows).data)
    if len(chosen) == len(step.rows):
        back = [-1] * whole.rows.num_rows
        for new, old in enumerate(chosen):
            back[old] = new
        assert torch.equal(rehome(there, whole.rows, back).data, value.data)


@given(steps(min_requests=1), st.data())
def test_rehome_refuses_every_wrong_row(step: Step, data: st.DataObject) -> None:
    geometry = pad_rows(geometry_of(step), len(step.rows) + 1)
    row_map = [*range(len(step.rows)), -1]
    rehome(_named(geometry.rows), geometry.rows, row_map)
    row = data.draw(st.integers(0, len(step.rows)))
    wrong = data.draw(st.integers(-1, len(step.rows)).filter(lambda r: r != row_map[row]))
    row_map[row] = wrong
    with pytest.raises(GeometryError, match=f"row {row} is request"):
        rehome(_named(geometry.rows), geometry.rows, row_map)


def test_a_seed_may_come_from_an_earlier_row_of_its_request_alone() -> None:
    before = geometry_of(_step(), "step 12")
    after = expand_drafts(before, 1)
    row_map = [0, 1, 2, 2, 3, 4, 5, 6, 6]
    with pytest.raises(GeometryError, match="row 3 is request 0 position 3, its source row 2"):
        rehome(_named(before.rows), after.rows, row_map)
    seeds = rehome(_named(before.rows), after.rows, row_map, match="request")
    assert seeds.data[:, 0].tolist() == [1, 2, 3, 3, 1006, 1007, 1008, 1009, 1009]
    with pytest.raises(GeometryError, match="row 3 is request 0"):
        rehome(_named(before.rows), after.rows, [0, 1, 2, 3, 3, 4, 5, 6, 6], match="request")


def test_rehome_names_bad_maps() -> None:
    axis = geometry_of(_step(), "step 12").rows
    value = _named(axis)
    with pytest.raises(GeometryError, match=r"row map of shape \(3,\), \(7,\) is needed"):
        rehome(value, axis, [0, 1, 2])
    with pytest.raises(GeometryError, match=r"allowed are rows 0..6 and -1"):
        rehome(value, axis, [0, 1, 2, 3, 4, 5, 7])
    inexact = advance(geometry_of(_step()), torch.tensor([3, 4])).rows
    with pytest.raises(GeometryError, match="host does not know"):
        rehome(value, inexact, list(range(7)))


@given(steps(), st.data())
def test_subsets_put_back_are_the_whole(step: Step, data: st.DataObject) -> None:
    geometry = pad_rows(geometry_of(step), len(step.rows) + data.draw(st.integers(0, 3)))
    axis = geometry.rows
    first = sorted(data.draw(st.sets(st.integers(0, max(len(step.rows) - 1, 0)), max_size=9)))
    first = [row for row in first if row < len(step.rows)]
    second = [row for row in range(len(step.rows)) if row not in first]
    parts = []
    for rows in (first, second):
        subset = RowSubset(axis, select(geometry, rows).rows, torch.tensor(rows, dtype=torch.int64))
        taken = subset.take(_named(axis))
        assert torch.equal(taken.data, _named(subset.axis).data)
        parts.append((subset, taken))
    assert torch.equal(RowSubset.restore(axis, parts).data, _named(axis).data)
    whole = RowSubset(axis, axis, None)
    value = _named(axis)
    assert whole.take(value) is value
    assert RowSubset.restore(axis, [(whole, value)]) is value
    if second:
        with pytest.raises(GeometryError, match="live rows, the axis has"):
            RowSubset.restore(axis, parts[:1])


def test_a_subset_of_another_axis_is_refused() -> None:
    geometry = geometry_of(_step(), "step 12")
    axis = geometry.rows
    rows = torch.arange(7)
    subset = RowSubset(axis, select(geometry, range(7)).rows, rows)
    value = subset.take(_named(axis))
    padded = pad_rows(geometry, 9).rows
    with pytest.raises(GeometryError, match="was taken from 'step 12'"):
        RowSubset.restore(padded, [(subset, value)])
    with pytest.raises(GeometryError, match="value is on row axis"):
        subset.take(_named(padded))
    with pytest.raises(GeometryError, match="value is on row axis"):
        RowSubset.restore(axis, [(subset, _named(axis))])
    with pytest.raises(GeometryError, match="rows is None exactly if"):
        RowSubset(axis, axis, rows)
    with pytest.raises(GeometryError, match=r"\(6,\) row numbers"):
        RowSubset(axis, subset.axis, rows[:6])
