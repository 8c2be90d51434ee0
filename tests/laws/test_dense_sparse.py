"""Law: with K ≥ length, sparse = dense; with a smaller K the output changes.

Sparse: the indexer's own lists, attended in the latent space. Dense: every visible entry.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.attention.geometry import RowTensor
from gnomon.attention.indices import KeySet, ListSegment, causal_list
from gnomon.attention.ops.values import Selection
from tests.unit.ops.build_step import DIMS, SmallStep, operators, small_step

OPS = operators()
SCALE = (DIMS.kv_lora_rank + DIMS.qk_rope_head_dim) ** -0.5


def run(step: SmallStep, keys: KeySet) -> tuple[torch.Tensor, torch.Tensor]:
    table = step.geometry.tables["tokens"]
    got = OPS.sparse_mla(step.q_latent, step.q_rope, step.latents, keys, table, SCALE)
    return got.out.data, got.lse.data


def select(step: SmallStep) -> Selection:
    return OPS.index_select(
        step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan
    )


def dense(step: SmallStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents as the keys and values of dense attention, a request at a time."""
    axis, rank = step.q_latent.axis, DIMS.kv_lora_rank
    q = torch.cat((step.q_latent.data, step.q_rope.data), -1)
    out, lse = torch.zeros_like(step.q_latent.data), torch.zeros(q.shape[:2])
    for request in range(step.geometry.requests.num_requests):
        rows = step.rows_of_request(request)
        entries = step.keys_of(step.latents, request)[:, None].expand(-1, DIMS.num_heads, -1)
        visible = axis.kv_len[rows]
        part = OPS.dense_mha(q[rows], entries, entries[..., :rank], visible, SCALE)
        out[rows], lse[rows] = part
    return out, lse


SHAPES = [([5], [5]), ([1], [64]), ([17, 1, 30], [17, 40, 64]), ([1] * 6, [1, 2, 31, 33, 63, 64])]


@pytest.mark.parametrize(("query_lens", "kv_lens"), SHAPES)
@pytest.mark.parametrize("index_topk", [64, 2048])
def test_a_wide_selection_is_dense(
    query_lens: list[int], kv_lens: list[int], index_topk: int
) -> None:
    step = small_step(query_lens, kv_lens, dims=replace(DIMS, index_topk=index_topk))
    assert not step.plan.score_chunks
    out, lse = run(step, select(step).keys)
    expected, expected_lse = dense(step)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("index_topk", [1, 8, 63])
def test_a_smaller_selection_changes_rows_that_see_more_and_no_other(index_topk: int) -> None:
    step = small_step([17, 1, 30], [17, 40, 64], dims=replace(DIMS, index_topk=index_topk))
    out, _ = run(step, select(step).keys)
    expected, _ = dense(step)
    sees_more = step.q_latent.axis.kv_len > index_topk
    difference = (out - expected).abs().amax((1, 2))
    assert bool((difference[~sees_more] < 1e-5).all())
    assert bool((difference[sees_more] > 1e-4).all())


def test_the_selection_is_better_than_the_first_keys() -> None:
    """Selected keys are those of the highest index scores: with scores that copy the attention's
    own logits, attending them comes closer to dense attention than attending any other list."""
    dims = replace(DIMS, index_head_dim=40, num_heads=1)
    step = small_step([1], [64], dims=dims)
    table, axis = step.geometry.tables["tokens"], step.q_latent.axis
    step.index_keys.typed().copy_(step.latents.typed())
    query = torch.cat((step.q_latent.data, step.q_rope.data), -1)
    same = RowTensor(axis, query.expand(1, 16, 40).contiguous())
    ones = RowTensor(axis, torch.ones(1, 16))
    chosen = OPS.index_select(same, ones, step.index_keys, step.geometry, step.plan)
    first = KeySet(axis, (causal_list(axis, "tokens", 8),))
    full = KeySet(axis, (causal_list(axis, "tokens", 64),))

    def attend(keys: KeySet) -> torch.Tensor:
        return OPS.sparse_mla(step.q_latent, step.q_rope, step.latents, keys, table, 1.0).lse.data

    truth = attend(full)
    assert float((attend(chosen.keys) - truth).abs().max()) < float(
        (attend(first) - truth).abs().min()
    )
    segment = chosen.keys.segments[0]
    assert isinstance(segment, ListSegment)
    logits = (query[0, 0] @ step.keys_of(step.latents, 0).T).clamp(min=0)
    assert segment.ids[0].tolist() == logits.topk(8).indices.sort().values.tolist()
