"""The operators' entry: axes are checked, padding rows follow the contract, segments join."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.attention.geometry import RowTensor
from gnomon.attention.indices import (
    KeySet,
    ListSegment,
    RangeSegment,
    Space,
    causal_list,
    causal_range,
    to_slots,
)
from gnomon.attention.ops.values import AttentionOut, IndexTransform, RopeTable
from gnomon.attention.providers import builtin_providers
from gnomon.errors import GeometryError, UnsupportedError
from tests.unit.ops.build_step import DIMS, SmallStep, operators, small_step

TORCH, TRUTH = operators("torch"), operators("reference")
SCALE = 0.3


def attend(step: SmallStep, keys: KeySet) -> AttentionOut:
    table = step.geometry.tables["tokens"]
    return TORCH.sparse_mla(step.q_latent, step.q_rope, step.latents, keys, table, SCALE)


def written_out(
    step: SmallStep, row: int, positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one row in float64, with softmax as a formula."""
    entries = step.keys_of(step.latents, int(step.q_latent.axis.request[row]))[positions].double()
    query = torch.cat((step.q_latent.data[row], step.q_rope.data[row]), -1).double()
    logits = SCALE * query @ entries.T
    return logits.softmax(-1) @ entries[:, : DIMS.kv_lora_rank], logits.logsumexp(-1)


def mixed_step() -> SmallStep:
    """Requests with one, several and many rows, padded to 24 rows."""
    return small_step([1, 5, 1, 12], [20, 9, 7, 12], num_rows=24)


def test_causal_list_and_causal_range_attend_the_same_keys() -> None:
    step = mixed_step()
    axis = step.q_latent.axis
    listed = attend(step, KeySet(axis, (causal_list(axis, "tokens", 20),)))
    ranged = attend(step, KeySet(axis, (causal_range(axis, "tokens"),)))
    for row in axis.live_rows().tolist():
        out, lse = written_out(step, row, list(range(int(axis.kv_len[row]))))
        for got in (listed, ranged):
            torch.testing.assert_close(got.out.data[row].double(), out, rtol=0, atol=1e-5)
            torch.testing.assert_close(got.lse.data[row].double(), lse, rtol=0, atol=1e-5)
    assert listed.out.axis is listed.lse.axis is axis


def test_padding_rows_give_zero_and_minus_infinity() -> None:
    step = mixed_step()
    axis = step.q_latent.axis
    got = attend(step, KeySet(axis, (causal_list(axis, "tokens", 20),)))
    padding = ~axis.is_live()
    assert int(padding.sum()) == 5
    assert bool((got.out.data[padding] == 0).all())
    assert bool((got.lse.data[padding] == -torch.inf).all())


def test_padded_rows_change_no_bit_of_live_rows() -> None:
    query_lens, kv_lens = [1, 5, 1, 12], [20, 9, 7, 12]
    plain, padded = small_step(query_lens, kv_lens), small_step(query_lens, kv_lens, num_rows=32)
    live = plain.geometry.rows.num_rows

    def grow(value: RowTensor) -> RowTensor:
        data = torch.zeros(32, *value.data.shape[1:])
        data[:live] = value.data
        data[live:] = 7.0  # whatever padding rows hold must not matter
        return RowTensor(padded.q_latent.axis, data)

    padded = replace(
        padded,
        q_latent=grow(plain.q_latent),
        q_rope=grow(plain.q_rope),
        latents=plain.latents,
        index_keys=plain.index_keys,
        index_query=grow(plain.index_query),
        head_weights=grow(plain.head_weights),
    )
    results = []
    for step in (plain, padded):
        chosen = TORCH.index_select(
            step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan, True
        )
        results.append((chosen, attend(step, chosen.keys)))
    (one, small), (other, large) = results
    first, second = one.keys.segments[0], other.keys.segments[0]
    assert isinstance(first, ListSegment)
    assert isinstance(second, ListSegment)
    assert torch.equal(first.ids, second.ids[:live])
    assert torch.equal(small.out.data, large.out.data[:live])
    assert torch.equal(small.lse.data, large.lse.data[:live])
    assert bool((second.ids[live:] == -1).all())
    assert not bool(other.nan_rows[live:].any())


def test_segments_of_one_part_join_to_their_union() -> None:
    step = small_step([1, 3], [20, 9])
    axis = step.q_latent.axis
    ids = torch.tensor([[0, 3, 5], [1, 2, -1], [0, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    count = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
    start = torch.tensor([10, 4, 5, 6], dtype=torch.int32)
    length = torch.tensor([10, 3, 0, 2], dtype=torch.int32)
    keys = KeySet(
        axis,
        (
            ListSegment("tokens", Space.POSITION, ids, count),
            RangeSegment("tokens", start, length),
        ),
    )
    got = attend(step, keys)
    unions = [[0, 3, 5, *range(10, 20)], [1, 2, 4, 5, 6], [0], [6, 7]]
    for row, positions in enumerate(unions):
        out, lse = written_out(step, row, positions)
        torch.testing.assert_close(got.out.data[row].double(), out, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.lse.data[row].double(), lse, rtol=0, atol=1e-5)


def test_sink_takes_its_share_and_leaves_the_lse() -> None:
    step = small_step([1, 2], [6, 4], num_rows=4)
    axis = step.q_latent.axis
    listed = (causal_list(axis, "tokens", 6),)
    sink = torch.tensor([0.5, -2.0, torch.inf, -torch.inf])
    plain, sunk = attend(step, KeySet(axis, listed)), attend(step, KeySet(axis, listed, sink))
    assert torch.equal(plain.lse.data, sunk.lse.data)
    for row in range(3):
        share = 1 / (1 + (sink - plain.lse.data[row]).exp())
        expected = plain.out.data[row] * share[:, None]
        torch.testing.assert_close(sunk.out.data[row], expected, rtol=0, atol=1e-6)
    assert bool((sunk.out.data[3] == 0).all())


def test_slots_are_taken_as_they_are() -> None:
    step = small_step([1, 3], [20, 9])
    axis, table = step.q_latent.axis, step.geometry.tables["tokens"]
    listed = causal_list(axis, "tokens", 20)
    by_slot = attend(step, KeySet(axis, (to_slots(listed, axis, table),)))
    assert torch.equal(by_slot.out.data, attend(step, KeySet(axis, (listed,))).out.data)


def test_several_parts_and_workspaces_are_refused() -> None:
    step = small_step([1], [6])
    axis = step.q_latent.axis
    two = (causal_list(axis, "tokens", 6), causal_list(axis, "window", 6))
    with pytest.raises(UnsupportedError, match="lse_merge"):
        attend(step, KeySet(axis, two))
    scratch = replace(two[0], space=Space.WORKSPACE)
    with pytest.raises(UnsupportedError, match="workspace"):
        attend(step, KeySet(axis, (scratch,)))


def test_values_of_another_axis_are_refused_by_name() -> None:
    step, other = small_step([2], [9]), small_step([2], [9])
    axis, table = step.q_latent.axis, step.geometry.tables["tokens"]
    keys = KeySet(axis, (causal_list(axis, "tokens", 8),))
    strange = KeySet(other.q_latent.axis, keys.segments)
    with pytest.raises(GeometryError, match="keys is on row axis"):
        TORCH.sparse_mla(step.q_latent, step.q_rope, step.latents, strange, table, SCALE)
    with pytest.raises(GeometryError, match="q_rope is on row axis"):
        TORCH.sparse_mla(step.q_latent, other.q_rope, step.latents, keys, table, SCALE)
    angles = torch.arange(10)[:, None] * torch.ones(4)
    rope = RopeTable(angles.cos(), angles.sin())
    rows, writes = rope.at(axis, True), step.geometry.writes["tokens"]
    elsewhere = rope.at(other.q_latent.axis, True)
    kv = RowTensor(axis, torch.randn(2, 40))
    weight = torch.ones(32)
    with pytest.raises(GeometryError, match="rope is on row axis"):
        TORCH.latent_write(kv, weight, 1e-6, elsewhere, step.latents, writes)
    lost = RowTensor(other.q_latent.axis, kv.data)
    with pytest.raises(GeometryError, match="kv_raw is on row axis"):
        TORCH.latent_write(lost, weight, 1e-6, rows, step.latents, writes)
    transform = IndexTransform(torch.ones(16), torch.zeros(16))
    key = RowTensor(axis, torch.randn(2, 16))
    query, pool = step.index_query, step.index_keys
    with pytest.raises(GeometryError, match="query_rope is on row axis"):
        TORCH.index_prepare(query, key, transform, (elsewhere, rows), pool, writes)
    with pytest.raises(GeometryError, match="key_rope is on row axis"):
        TORCH.index_prepare(query, key, transform, (rows, elsewhere), pool, writes)
    with pytest.raises(GeometryError, match="rope: x has 3 rows"):
        TORCH.rope(torch.randn(3, 4, 8), rows)


def test_queries_without_rows_still_write_keys() -> None:
    step = small_step([3], [3])
    axis, writes = step.q_latent.axis, step.geometry.writes["tokens"]
    nobody = small_step([1], [1]).geometry.rows
    empty = type(nobody)(
        nobody.request[:0], nobody.position[:0], nobody.kv_len[:0], 0, (), "nobody"
    )
    angles = torch.arange(10)[:, None] * torch.ones(4)
    rope = RopeTable(angles.cos(), angles.sin())
    key = RowTensor(axis, torch.randn(3, 16))
    query = RowTensor(empty, torch.randn(0, 16, 16))
    for has_hadamard in (False, True):
        transform = IndexTransform(torch.ones(16), torch.zeros(16), 1e-6, has_hadamard)
        pools = []
        for ops in (TORCH, TRUTH):
            step.index_keys.typed().zero_()
            rotations = (rope.at(empty, True), rope.at(axis, True))
            got = ops.index_prepare(query, key, transform, rotations, step.index_keys, writes)
            assert got.axis is empty
            assert got.data.shape == (0, 16, 16)
            pools.append(step.index_keys.typed().clone())
        torch.testing.assert_close(*pools, rtol=0, atol=1e-5)
        assert int((pools[0] != 0).any(1).sum()) == 3


def test_context_gather_reads_one_request_in_order() -> None:
    step = small_step([1, 1], [11, 9])
    table = step.geometry.tables["tokens"]
    for ops in (operators(provider.name) for provider in builtin_providers()):
        got = ops.context_gather(step.latents, table, 1, 2, 9)
        assert torch.equal(got, step.keys_of(step.latents, 1)[2:9])
