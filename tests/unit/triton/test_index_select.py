"""Selection by the triton kernels, bound as an engine binds them, against the torch provider."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.indices import ListSegment, to_slots
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.providers.triton import PROVIDER
from tests.unit.ops.build_step import operators, small_step

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
    assert torch.equal(segment.held.slots, slots.ids)
