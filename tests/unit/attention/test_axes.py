"""Values that travel from axis to axis: every width, every fill, every order of the ranks."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.axes import RowSpan, take_rows
from gnomon.attention.geometry import RowTensor, build_geometry, rehome
from gnomon.attention.indices import ListSegment, Space, causal_range, to_slots
from gnomon.attention.transforms import advance, gather_rows, pad_rows, select, shard_rows
from gnomon.errors import GeometryError
from tests.unit.attention.steps import tokens_of


@pytest.mark.parametrize("shape", [(), (3,), (5,), (2, 3)])
def test_rows_of_any_width_are_taken_and_filled_whole(shape: tuple[int, ...]) -> None:
    """Five rows out of three, two of them fill; one width equals the number of rows."""
    data = torch.arange(3 * max(1, torch.Size(shape).numel()), dtype=torch.float64) + 1
    data = data.view(3, *shape)
    source = [2, -1, 0, 1, -1]
    taken = take_rows(data, torch.tensor(source), -7.0)
    assert taken.shape == (5, *shape)
    for row, origin in enumerate(source):
        expected = torch.full(shape, -7.0, dtype=torch.float64) if origin < 0 else data[origin]
        assert torch.equal(taken[row], expected)
    nothing = take_rows(data[:0], torch.tensor([-1, -1]), 4.0)
    assert torch.equal(nothing, torch.full((2, *shape), 4.0, dtype=torch.float64))


def test_wide_values_are_carried_to_a_padded_axis() -> None:
    rows = build_geometry([2, 1], [4, 9], {"tokens": [[1], [2, 3, 4]]}, 4)
    padded = pad_rows(rows, 5)
    data = torch.arange(12.0).view(3, 2, 2) + 1
    moved = rehome(RowTensor(rows.rows, data), padded.rows, [0, 1, 2, -1, -1])
    assert torch.equal(moved.data[:3], data)
    assert not moved.data[3:].any()


def test_padding_takes_nothing_over_not_even_other_padding() -> None:
    step = build_geometry([2], [4], {"tokens": [[1]]}, 4)
    padded = pad_rows(step, 3)
    turned = select(padded, [2, 0, 1])  # its row 0 is the padding row
    value = RowTensor(turned.rows, torch.tensor([9.0, 1.0, 2.0]))
    assert rehome(value, padded.rows, [1, 2, -1]).data.tolist() == [1.0, 2.0, 0.0]
    with pytest.raises(GeometryError, match="row 2 is request -1"):
        rehome(value, padded.rows, [1, 2, 0])


@pytest.mark.parametrize("order", [[3, 0, 2, 1], [1, 2, 3], [2], [0, 3, 1]])
def test_lists_on_padded_and_turned_axes_go_by_the_requests_of_their_rows(order: list[int]) -> None:
    """Rows 0, 1 are request 0, row 2 is request 1, row 3 is padding; a page holds 2 tokens."""
    pages = [[4, 2, 7], [1, 3, 6]]
    step = pad_rows(build_geometry([2, 1], [4, 5], {"tokens": pages}, 2), 4)
    axis = select(step, order).rows
    chosen = {0: [0, 2], 1: [1, 3], 2: [0, 3, 4], 3: []}
    ids = torch.tensor([chosen[row] + [-1] * (3 - len(chosen[row])) for row in order])
    count = torch.tensor([len(chosen[row]) for row in order], dtype=torch.int32)
    segment = ListSegment("tokens", Space.POSITION, ids, count)
    slots = to_slots(segment, axis, step.tables["tokens"]).ids.tolist()
    for row, got in zip(order, slots, strict=True):
        own = pages[1 if row == 2 else 0]
        expected = [own[p // 2] * 2 + p % 2 for p in chosen[row]]
        assert got == expected + [-1] * (3 - len(expected))


def test_ranks_may_be_gathered_in_any_order() -> None:
    """The step's write axis is in rank order; another order is an axis of its own."""
    geometry = build_geometry([6], [6], {"tokens": [[1, 2]]}, 4)
    ranks = [shard_rows(geometry, rank, 2) for rank in range(2)]
    in_order = gather_rows(ranks).rows
    assert tokens_of(in_order) == [(0, p) for p in (0, 2, 4, 1, 3, 5)]
    assert in_order is ranks[0].writes["tokens"].axis
    turned = gather_rows(ranks[::-1]).rows
    assert tokens_of(turned) == [(0, p) for p in (1, 3, 5, 0, 2, 4)]


def test_one_rank_with_bounds_makes_the_gathered_axis_a_bound() -> None:
    exact = build_geometry([2], [5], {"tokens": [[1, 2]]}, 4)
    bound = advance(build_geometry([2], [7], {"tokens": [[1, 2]]}, 4), torch.tensor([1]))
    assert gather_rows([exact, build_geometry([1], [3], {"tokens": [[1]]}, 4)]).rows.is_exact
    for ranks in ([exact, bound], [bound, exact]):
        gathered = gather_rows(ranks)
        assert not gathered.rows.is_exact
        assert not gathered.requests.host.is_exact


def test_a_list_of_pages_for_packed_entries_writes_where_entries_end() -> None:
    """Four tokens an entry, two entries a page: of positions 2..9, 3 and 7 end entries 0 and 1."""
    geometry = build_geometry([8], [10], {"packed": [[5, 6]]}, 2, tokens_per_entry=4)
    slots = geometry.writes["packed"].slots.tolist()
    assert slots == [-1, 10, -1, -1, -1, 11, -1, -1]
    geometry.check({"packed": 7})


def test_a_causal_range_is_of_tokens_unless_told_otherwise() -> None:
    rows = build_geometry([3], [5], {"tokens": [[1, 2]]}, 4).rows
    assert causal_range(rows, "tokens").count.tolist() == [3, 4, 5]
    assert causal_range(rows, "tokens").start.tolist() == [0, 0, 0]


def test_a_span_of_one_row_ends_where_it_starts() -> None:
    assert RowSpan(0, 4, 5, 9, 3).last_position == 9
    assert RowSpan(0, 4, 8, 9).last_position == 12
