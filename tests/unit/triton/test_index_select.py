"""Selection by the triton kernels, bound as an engine binds them, against the torch provider."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.decode_plan import StaticRows, decode_geometry, plan_decode
from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.geometry import RowTensor
from gnomon.attention.indices import ListSegment, to_slots
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan_limits import Budget, Capabilities
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.providers.triton import PROVIDER
from tests.unit.ops.build_step import DIMS, operators, small_step

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize(
    ("query", "kv", "num_rows"),
    [
        ([1, 1, 1, 1], [40, 9, 8, 21], None),
        ([1, 1, 1], [33, 4, 60], 5),
        ([13, 1, 10, 1, 2], [50, 31, 20, 7, 12], None),
        ([6], [60], 8),
        ([3], [5], None),
    ],
)
def test_lists_and_slots(query: list[int], kv: list[int], num_rows: int | None) -> None:
    step = small_step(query, kv, num_rows=num_rows)
    ops, choices = bind_operators(OpNeed(), (PROVIDER, torch_provider.PROVIDER))
    by_op = {choice.op: choice.provider.name for choice in choices}
    assert by_op["topk"] == by_op["index_scores"] == by_op["index_scores_paged"] == "triton"
    assert {"topk_slots", "lazy_scores", "lazy_scores_paged"} <= set(ops.fusions)
    arguments = (
        step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan, True
    )  # fmt: skip
    found, expected = ops.index_select(*arguments), operators().index_select(*arguments)
    segment, truth = found.keys.segments[0], expected.keys.segments[0]
    assert isinstance(segment, ListSegment)
    assert isinstance(truth, ListSegment)
    assert torch.equal(segment.ids, truth.ids)
    assert torch.equal(segment.count, truth.count)
    assert found.margin is not None
    assert expected.margin is not None
    torch.testing.assert_close(found.margin, expected.margin, rtol=1e-5, atol=1e-5)
    assert segment.held is not None
    slots = to_slots(truth, found.keys.axis, step.geometry.tables["tokens"], validate=True)
    assert torch.equal(segment.held.slots.long(), slots.ids)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("score_bytes", [1 << 30, 12_000])
def test_nan_flags_only_rows_that_choose(is_captured: bool, score_bytes: int) -> None:
    """Rows of at most K = 8 keys take them all: no NaN flags them, whoever chooses by what plan."""
    step = small_step([1] * 5, [40, 8, 9, 5, 8])
    step.index_keys.typed().fill_(torch.nan)
    geometry, plan = step.geometry, step.plan
    axis = geometry.rows
    if is_captured:
        table = geometry.tables["tokens"]
        held = StaticRows(
            axis.request, axis.position, axis.kv_len, geometry.requests.query_len,
            {"tokens": table.pages}, {"tokens": geometry.writes["tokens"].slots},
        )  # fmt: skip
        geometry = decode_geometry(held, table.page_size, 40)
        plan = plan_decode(geometry, DIMS, Capabilities(), Budget(score_bytes=score_bytes))
        axis = geometry.rows
        assert (len(plan.score_chunks) == 1) == (score_bytes > 12_000)
    fused, _ = bind_operators(OpNeed(), (PROVIDER, torch_provider.PROVIDER))
    for ops in (fused, Operators(fused.kernels), operators()):
        found = ops.index_select(
            RowTensor(axis, step.index_query.data), RowTensor(axis, step.head_weights.data),
            step.index_keys, geometry, plan,
        )  # fmt: skip
        assert found.nan_rows.tolist() == [True, False, True, False, False]
