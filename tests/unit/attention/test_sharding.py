"""Shards of a step are the step: every row once, every key written, order restored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.geometry import Geometry, build_geometry
from gnomon.attention.sequence import token_order
from gnomon.attention.sharding import ShardStrategy, gather_rows, shard_rows
from gnomon.attention.transforms import advance, pad_rows, select
from gnomon.errors import GeometryError
from tests.unit.attention.steps import (
    Step,
    assert_same,
    geometry_of,
    seen,
    steps,
    tokens_of,
    written,
)

STRATEGIES = st.sampled_from(list(ShardStrategy))


def _shards(geometry: Geometry, size: int, strategy: ShardStrategy) -> list[Geometry]:
    return [shard_rows(geometry, rank, size, strategy) for rank in range(size)]


@given(steps(), st.integers(1, 9), STRATEGIES, st.integers(0, 7))
def test_ranks_hold_every_row_once_and_write_every_key(
    step: Step, size: int, strategy: ShardStrategy, padding: int
) -> None:
    whole = pad_rows(geometry_of(step), len(step.rows) + padding)
    keys = dict(zip(step.rows, seen(geometry_of(step)), strict=True))
    shards = _shards(whole, size, strategy)
    held = []
    for shard in shards:
        shard.check(step.num_pages())
        assert shard.rows.num_rows == shards[0].rows.num_rows
        mine = [token for token in tokens_of(shard.rows) if token is not None]
        assert seen(shard)[: len(mine)] == [keys[token] for token in mine]
        assert tokens_of(shard.rows)[len(mine) :] == [None] * (shard.rows.num_rows - len(mine))
        held += mine
        for group in ("tokens", "compressed"):
            assert written(shard, group) == written(whole, group)
            assert shard.writes[group].local is shard.rows
            assert shard.writes[group].axis.rank_rows == (shard.rows.num_rows,) * size
    assert sorted(held) == sorted(token for token in step.rows if token is not None)
    assert shards[0].rows.num_rows == max(shard.rows.num_live for shard in shards)


@given(steps(), st.integers(1, 9), STRATEGIES)
def test_gathered_rows_are_the_all_gather_and_order_restores_the_step(
    step: Step, size: int, strategy: ShardStrategy
) -> None:
    shards = _shards(geometry_of(step), size, strategy)
    gathered = gather_rows(shards)
    gathered.check(step.num_pages())
    assert tokens_of(gathered.rows) == [t for shard in shards for t in tokens_of(shard.rows)]
    assert gathered.rows is gathered.writes["tokens"].axis
    assert_same(select(gathered, token_order(gathered.rows)), step)


@given(steps(), st.integers(1, 9))
def test_round_robin_deals_row_i_to_rank_i_modulo_size(step: Step, size: int) -> None:
    for rank, shard in enumerate(_shards(geometry_of(step), size, ShardStrategy.ROUND_ROBIN)):
        live = [token for token in tokens_of(shard.rows) if token is not None]
        assert live == step.rows[rank::size]


def test_zigzag_gives_each_rank_an_early_and_a_late_block() -> None:
    geometry = build_geometry([16], [20], {"tokens": [[1, 2]]}, 16)
    ranks = [
        [token[1] for token in tokens_of(shard.rows) if token]
        for shard in _shards(geometry, 4, ShardStrategy.ZIGZAG)
    ]
    assert ranks == [[4, 5, 18, 19], [6, 7, 16, 17], [8, 9, 14, 15], [10, 11, 12, 13]]
    assert [sum(p + 1 for p in positions) for positions in ranks] == [50, 50, 50, 50]


@given(steps(max_requests=8), st.integers(1, 9), STRATEGIES)
def test_ranks_are_balanced(step: Step, size: int, strategy: ShardStrategy) -> None:
    counts = [s.rows.num_live for s in _shards(geometry_of(step), size, strategy)]
    assert max(counts) - min(counts) <= (1 if strategy is ShardStrategy.ROUND_ROBIN else 2)


def test_ranks_without_rows_and_padding_far_above_size() -> None:
    geometry = build_geometry([2], [40], {"tokens": [[7, 8, 9]]}, 16)
    for strategy in ShardStrategy:
        shards = [shard_rows(geometry, r, 8, strategy, rows_per_rank=50) for r in range(8)]
        assert sorted(s.rows.num_live for s in shards) == [0] * 6 + [1] * 2
        for shard in shards:
            shard.check()
            assert shard.rows.num_rows == 50
            assert shard.writes["tokens"].slots.shape == (400,)
    empty = build_geometry([], [], {"tokens": []}, 16)
    assert shard_rows(empty, 3, 4).rows.num_rows == 0


def test_strided_rows_have_their_own_positions() -> None:
    """The second motivating fault: a strided row's position is not start + offset."""
    geometry = build_geometry([5, 6], [261, 6], {"tokens": [list(range(1, 34)), [40]]}, 8)
    shard = pad_rows(shard_rows(geometry, 1, 4), 8)
    assert tokens_of(shard.rows) == [(0, 257), (1, 0), (1, 4), *[None] * 5]
    assert [(s.request, s.position, s.stride) for s in shard.rows.spans] == [(0, 257, 1), (1, 0, 4)]


@given(steps(), steps())
def test_data_parallel_steps_are_numbered_through(first: Step, second: Step) -> None:
    ranks = [pad_rows(geometry_of(step), len(step.rows) + 2) for step in (first, second)]
    gathered = gather_rows(ranks)
    gathered.check()
    shifted = [(b + len(first.query_len), p) for b, p in second.tokens()]
    assert tokens_of(gathered.rows) == [*first.rows, None, None, *shifted, None, None]
    assert gathered.rows.rank_rows == (len(first.rows) + 2, len(second.rows) + 2)
    assert not gathered.tables
    assert not gathered.writes
    assert gathered.requests.host.kv_len == (*first.kv_len, *second.kv_len)


def test_bad_calls_name_what_is_allowed() -> None:
    geometry = build_geometry([7], [9], {"tokens": [[1]]}, 16, label="step 12")
    with pytest.raises(GeometryError, match="rank 4 of 4 ranks"):
        shard_rows(geometry, 4, 4)
    with pytest.raises(GeometryError, match="1 rows a rank, but a rank gets 2 of 7 live rows"):
        shard_rows(geometry, 0, 4, rows_per_rank=1)
    with pytest.raises(ValueError, match="striped"):
        shard_rows(geometry, 0, 4, "striped")
    with pytest.raises(GeometryError, match="before select"):
        shard_rows(select(geometry, [0]), 0, 2)
    with pytest.raises(GeometryError, match="only once"):
        shard_rows(shard_rows(geometry, 0, 2), 0, 2)
    with pytest.raises(GeometryError, match="does not know which rows are live"):
        shard_rows(advance(geometry, torch.tensor([3])), 0, 2)
    with pytest.raises(GeometryError, match="no rank"):
        gather_rows([])
    other = build_geometry([1], [1], {"tokens": [[1]]}, 16)
    with pytest.raises(GeometryError, match="3 ranks have 2 request axes"):
        gather_rows([geometry, geometry, other])
