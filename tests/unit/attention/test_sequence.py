"""Rows as sequences, and keys over ranks, against plain loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.ownership import KeyOwnership
from gnomon.attention.sequence import sequence_view
from gnomon.attention.sharding import ShardStrategy, gather_rows, shard_rows
from gnomon.attention.transforms import advance, pad_rows, split
from gnomon.errors import GeometryError
from tests.unit.attention.steps import Step, geometry_of, steps, tokens_of


@given(steps(), st.integers(1, 5), st.sampled_from(list(ShardStrategy)))
def test_token_order_survives_strided_rows(step: Step, size: int, strategy: ShardStrategy) -> None:
    whole = geometry_of(step)
    gathered = gather_rows([shard_rows(whole, r, size, strategy) for r in range(size)])
    slots = [7 * b for b in range(len(step.query_len))]
    for geometry in (whole, pad_rows(whole, len(step.rows) + 3), gathered):
        view = sequence_view(geometry.rows, geometry.requests, slots)
        rows = tokens_of(geometry.rows)
        assert [rows[i] for i in view.order.tolist()] == step.rows
        starts = view.cu_len.tolist()
        assert starts[0] == 0
        assert [b - a for a, b in pairwise(starts)] == step.query_len
        assert view.length.tolist() == step.query_len
        assert view.state_slot.tolist() == slots


def test_rejected_rows_end_a_sequence_early() -> None:
    step = Step([3, 4], [3, 9], [[1], [2, 3, 4]], 4, [[1], [2, 3]])
    geometry = advance(geometry_of(step), torch.tensor([2, 1]))
    view = sequence_view(geometry.rows, geometry.requests)
    assert view.cu_len.tolist() == [0, 3, 7]
    assert view.length.tolist() == [2, 1]
    assert view.state_slot.tolist() == [-1, -1]
    exact = advance(geometry_of(step), [2, 1])
    view = sequence_view(exact.rows, exact.requests)
    assert view.order.tolist() == [0, 1, 3]
    assert view.cu_len.tolist() == [0, 2, 3]


def test_a_state_that_would_skip_tokens_is_refused() -> None:
    step = Step([3, 4], [3, 9], [[1], [2, 3, 4]], 4, [[1], [2, 3]])
    geometry = geometry_of(step, "step 12")
    shard = shard_rows(geometry, 0, 2)
    with pytest.raises(GeometryError, match="2 of the 3 rows of request 0"):
        sequence_view(shard.rows, shard.requests)
    first, second = split(geometry, [5, 2])
    for part in (first, second):
        with pytest.raises(GeometryError, match="2 of the 4 rows of request 1"):
            sequence_view(part.rows, part.requests)
    first, _ = split(geometry, [3, 4])
    assert sequence_view(first.rows, first.requests).cu_len.tolist() == [0, 3, 3]
    with pytest.raises(GeometryError, match="1 state slots, 2 requests"):
        sequence_view(geometry.rows, geometry.requests, [1])


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 200))
def test_each_key_has_one_owner_and_a_dense_local_place(
    size: int, interleave: int, kv_len: int
) -> None:
    ranks = [KeyOwnership(rank, size, interleave) for rank in range(size)]
    owner = [p // interleave % size for p in range(kv_len)]
    positions = torch.arange(kv_len)
    assert ranks[0].owner(positions).tolist() == owner
    for rank in ranks:
        mine = [p for p in range(kv_len) if owner[p] == rank.rank]
        assert rank.num_owned(kv_len) == len(mine)
        assert rank.num_owned(torch.tensor([kv_len])).tolist() == [len(mine)]
        assert [rank.local_position(p) for p in mine] == list(range(len(mine)))
        assert rank.global_position(torch.arange(len(mine))).tolist() == mine


@pytest.mark.parametrize(("rank", "size", "interleave"), [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_bad_ownership_is_refused(rank: int, size: int, interleave: int) -> None:
    with pytest.raises(GeometryError, match="0 <= rank < size and interleave >= 1"):
        KeyOwnership(rank, size, interleave)
