"""index_select against loops that know nothing of pages, chunks or plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.geometry import RowTensor
from gnomon.attention.indices import ListSegment
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import Selection
from gnomon.attention.plan import Budget
from gnomon.errors import GeometryError
from tests.unit.ops.build_step import DIMS, SmallStep, operators, small_step

TORCH, FIXED = operators(), operators(is_deterministic=True)


def select(step: SmallStep, *, want_margin: bool = True, ops: Operators = TORCH) -> Selection:
    return ops.index_select(
        step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan, want_margin
    )


def only_list(chosen: Selection) -> ListSegment:
    segment = chosen.keys.segments[0]
    assert isinstance(segment, ListSegment)
    return segment


def scores_of(step: SmallStep, row: int) -> torch.Tensor:
    """float64 scores of one row over its visible keys, straight from the formula."""
    axis = step.index_query.axis
    keys = step.keys_of(step.index_keys, int(axis.request[row]))[: int(axis.kv_len[row])].double()
    query, weights = step.index_query.data[row].double(), step.head_weights.data[row].double()
    factor = DIMS.index_num_heads**-0.5 * DIMS.index_head_dim**-0.5
    return (weights[:, None] * (query @ keys.T).clamp(min=0)).sum(0) * factor


def check_against_loops(step: SmallStep) -> None:
    chosen = select(step)
    chosen.keys.check()
    segment, axis, k = only_list(chosen), step.index_query.axis, DIMS.index_topk
    assert chosen.margin is not None
    assert not bool(chosen.nan_rows.any())
    for row in range(axis.num_rows):
        count = int(segment.count[row])
        assert count == min(k, int(axis.kv_len[row]))
        if int(axis.request[row]) < 0:
            continue
        ranked = scores_of(step, row).sort(descending=True)
        expected = sorted(ranked.indices[:k].tolist())
        gap = float(ranked.values[k - 1] - ranked.values[k]) if len(ranked.values) > k else None
        if gap is None:
            assert float(chosen.margin[row]) == torch.inf
        else:
            assert float(chosen.margin[row]) == pytest.approx(gap, abs=1e-5)
        if gap is None or gap > 1e-5:
            assert segment.ids[row, :count].tolist() == expected


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "num_rows"),
    [
        ([1], [3], None),
        ([1], [8], None),
        ([1], [9], None),
        ([1, 1, 1, 1], [40, 9, 8, 21], None),
        ([1, 1, 1], [33, 4, 60], 16),
        ([30], [30], None),
        ([13, 1, 20, 1, 2], [50, 31, 20, 7, 12], None),
        ([13, 1, 20, 1, 2], [50, 31, 20, 7, 12], 48),
    ],
)
def test_lists_are_the_best_keys(
    query_lens: list[int], kv_lens: list[int], num_rows: int | None
) -> None:
    check_against_loops(small_step(query_lens, kv_lens, num_rows=num_rows))


@st.composite
def lengths(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    kv = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    return [draw(st.integers(1, n)) for n in kv], kv


@given(lengths(), st.integers(200, 30000), st.integers(0, 3))
def test_lists_do_not_hang_on_the_budget(
    both: tuple[list[int], list[int]], score_bytes: int, seed: int
) -> None:
    whole = small_step(*both, seed=seed, budget=Budget(score_bytes=1 << 26))
    pieces = small_step(*both, seed=seed, budget=Budget(score_bytes=score_bytes))
    one, other = select(whole, ops=FIXED), select(pieces, ops=FIXED)
    assert torch.equal(only_list(one).ids, only_list(other).ids)
    assert torch.equal(only_list(one).count, only_list(other).count)
    assert one.margin is not None
    assert other.margin is not None
    assert torch.equal(one.margin, other.margin)


def test_ties_across_key_chunks_fall_to_the_lower_position() -> None:
    step = small_step([20], [60], budget=Budget(score_bytes=4000))
    assert len(step.plan.score_chunks) > 20
    step.index_keys.typed().fill_(1.0)  # every key of every row scores the same, to the bit
    chosen = select(step, ops=FIXED)
    assert only_list(chosen).ids.tolist() == [list(range(8))] * 20
    assert chosen.margin is not None
    assert chosen.margin.tolist() == [0.0] * 20


def test_nan_keys_lose_and_flag_only_the_rows_that_see_them() -> None:
    for budget in (Budget(), Budget(score_bytes=4000)):
        step = small_step([20, 1], [60, 30], budget=budget)
        table = step.geometry.tables["tokens"]
        slot = int(table.pages[0, 12]) * table.page_size + 2  # position 50 of request 0
        step.index_keys.typed()[slot] = torch.nan
        chosen = select(step)
        positions = step.index_query.axis.position
        sees = (step.index_query.axis.request == 0) & (positions >= 50)
        assert torch.equal(chosen.nan_rows, sees)
        assert not bool((only_list(chosen).ids == 50).any())
        assert chosen.margin is not None
        assert not bool(chosen.margin.isnan().any())


def test_no_margin_unless_asked() -> None:
    assert select(small_step([3], [20]), want_margin=False).margin is None


def test_rows_of_another_axis_or_plan_are_refused() -> None:
    step, other = small_step([3], [20]), small_step([3], [20])
    with pytest.raises(GeometryError, match="head_weights"):
        select(replace(step, head_weights=other.head_weights))
    with pytest.raises(GeometryError, match="query is on row axis"):
        select(replace(step, index_query=other.index_query, head_weights=other.head_weights))
    with pytest.raises(GeometryError, match="plan the geometry that is run"):
        select(replace(step, geometry=other.geometry))


def test_float64_queries_give_float64_margins() -> None:
    step = small_step([1], [20])
    wide = replace(
        step,
        index_query=RowTensor(step.index_query.axis, step.index_query.data.double()),
        head_weights=RowTensor(step.index_query.axis, step.head_weights.data.double()),
    )
    chosen = select(wide)
    assert chosen.margin is not None
    assert chosen.margin.dtype == torch.float64
