"""Where a plan's chunks lie and what they cost, counted by hand: sizes, offsets, edges.

That chunks cover every pair once is test_plan.py's; here are the numbers beside the ranges, which
a wrong formula could leave plausible (found by tools/mutation).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.attention.context_chunks import ContextChunk, ContextGather, ContextPiece, context_bytes
from gnomon.attention.geometry import build_geometry
from gnomon.attention.plan import (
    Budget,
    Capabilities,
    ContiguousScoreChunk,
    PagedScoreChunk,
    plan_step,
)
from gnomon.attention.routes import AttentionDims, DensePolicy, RoutePolicy
from gnomon.attention.score_chunks import score_bytes
from gnomon.attention.transforms import shard_rows
from gnomon.errors import ConfigError

DIMS = AttentionDims(2, 8, 4, 2, 4, index_topk=6, index_num_heads=3, index_head_dim=5)
NEVER, ALWAYS = RoutePolicy(DensePolicy.NEVER), RoutePolicy(DensePolicy.ALWAYS)


def test_index_lists_are_as_wide_as_the_longest_row_sees_and_at_most_topk() -> None:
    for kv_len, topk, width in ((1, 6, 1), (5, 6, 5), (6, 6, 6), (7, 6, 6), (40, 6, 6)):
        geometry = build_geometry([1], [kv_len], {"tokens": [[1, 2, 3]]}, 16)
        dims = replace(DIMS, index_topk=topk)
        assert plan_step(geometry, dims, policy=NEVER).index_width == width
        fixed = plan_step(geometry, dims, Capabilities(has_fixed_width=True), policy=NEVER)
        assert fixed.index_width == topk
    without = AttentionDims(2, 8, 4, 2, 4)
    geometry = build_geometry([1, 2], [9, 40], {"tokens": [[1], [2, 3, 4]]}, 16)
    plan = plan_step(geometry, without, policy=NEVER)
    assert (plan.index_width, plan.score_chunks) == (40, ())  # no indexer: nothing to score


def test_the_longest_row_of_a_shard_is_the_last_of_its_stride() -> None:
    """Rows 1, 4, 7 of a prompt see 2, 5 and 8 keys: the list holds 8, not 4 (as if in a row)."""
    geometry = build_geometry([9], [9], {"tokens": [[1]]}, 16)
    shard = shard_rows(geometry, 1, 3)
    (span,) = shard.rows.spans
    assert (span.position, span.stride, span.num_rows, span.last_position) == (1, 3, 3, 7)
    dims = replace(DIMS, index_topk=20)
    assert plan_step(shard, dims, policy=NEVER).index_width == 8


@pytest.mark.parametrize(("holds_heads", "per_pair"), [(True, 1 + 3), (False, 1)])
@pytest.mark.parametrize(("holds_keys", "per_key"), [(True, 5), (False, 0)])
def test_bytes_of_score_chunks(
    holds_heads: bool, per_pair: int, holds_keys: bool, per_key: int
) -> None:
    """fp32: 7 keys of 5 numbers once for all rows, or once for each row where pages differ."""
    capabilities = Capabilities(holds_head_scores=holds_heads, holds_paged_keys=holds_keys)
    block = ContiguousScoreChunk(0, 10, 13, 16, 23)
    assert score_bytes(block, DIMS, capabilities) == 4 * (3 * 7 * per_pair + 7 * 5)
    paged = PagedScoreChunk((4, 9), 0, 7)
    assert score_bytes(paged, DIMS, capabilities) == 4 * (2 * 7 * per_pair + 2 * 7 * per_key)


@pytest.mark.parametrize("holds_scores", [True, False])
def test_bytes_of_context_chunks(holds_scores: bool) -> None:
    """A key: a latent of 8 + 2, and for 2 heads a key of 4 + 2 and a value of 4."""
    pieces = (ContextPiece(0, 0, 3, 0, 5, 0), ContextPiece(1, 3, 4, 0, 9, 5))
    chunk = ContextChunk((ContextGather(0, 0, 5, 0), ContextGather(1, 0, 9, 5)), pieces)
    held = 3 * 5 * 2 if holds_scores else 0  # of the larger piece: 15 pairs, not 9
    expected = 4 * (14 * (10 + 2 * (6 + 4)) + held)
    assert context_bytes(chunk, DIMS, Capabilities(holds_dense_scores=holds_scores)) == expected


def test_a_block_keeps_its_rows_while_it_can_take_one_page() -> None:
    """16 rows against exactly one page of keys fit; with one float less the block is halved."""
    geometry = build_geometry([16], [1000], {"tokens": [list(range(1, 64))]}, 16)
    one_page = 4 * 16 * (16 * 4 + 5)
    for score_bytes_left, rows in ((one_page, 16), (one_page - 4, 8)):
        plan = plan_step(geometry, DIMS, budget=Budget(score_bytes=score_bytes_left), policy=NEVER)
        first = plan.score_chunks[0]
        assert isinstance(first, ContiguousScoreChunk)
        assert (first.num_rows, first.num_keys % 16) == (rows, 0)


def test_pieces_find_their_keys_where_they_were_gathered() -> None:
    lens = [5, 6, 3, 4]
    geometry = build_geometry(lens, lens, {"tokens": [[b + 1] for b in range(4)]}, 16)
    plan = plan_step(geometry, DIMS, budget=Budget(context_rows=16), policy=ALWAYS)
    assert len(plan.context_chunks) == 2
    for chunk in plan.context_chunks:
        end = 0
        places = {}
        for gather in chunk.gathers:
            assert gather.offset == end  # side by side in the workspace
            end += gather.stop - gather.start
            places[gather.request] = gather
        for piece in chunk.pieces:
            gather = places[piece.request]
            assert (piece.key_start, piece.key_stop) == (gather.start, gather.stop)
            assert piece.key_offset == gather.offset
    assert [[p.key_offset for p in c.pieces] for c in plan.context_chunks] == [[0, 5, 11], [0]]


def test_dense_rows_are_cut_so_that_their_scores_stay_in_the_budget() -> None:
    """40 keys, 2 heads, fp32: 1280 bytes hold 4 rows' scores; a provider without them cuts none."""
    geometry = build_geometry([10], [40], {"tokens": [[1, 2, 3]]}, 16)
    dims = replace(DIMS, index_topk=40)
    cases = (
        (True, 1280, [(0, 4), (4, 8), (8, 10)]),
        (True, 160, [(row, row + 1) for row in range(10)]),  # half a row's scores: one row each
        (False, 160, [(0, 10)]),
    )
    for holds, most, blocks in cases:
        capabilities = Capabilities(holds_dense_scores=holds)
        plan = plan_step(geometry, dims, capabilities, Budget(score_bytes=most), policy=ALWAYS)
        (chunk,) = plan.context_chunks
        assert [(piece.row_start, piece.row_stop) for piece in chunk.pieces] == blocks


def test_a_block_takes_as_many_rows_as_meet_all_their_keys_in_the_budget() -> None:
    """Counted up from one row; 60 rows behind 100 tokens, every budget from 16 rows to all."""
    geometry = build_geometry([60], [160], {"tokens": [list(range(1, 11))]}, 16)
    for floats in range(116 * (16 * 4 + 5), 161 * (60 * 4 + 5), 577):
        fitting = [r for r in range(1, 61) if (100 + r) * (r * 4 + 5) <= floats]
        plan = plan_step(geometry, DIMS, budget=Budget(score_bytes=4 * floats), policy=NEVER)
        first = plan.score_chunks[0]
        assert isinstance(first, ContiguousScoreChunk)
        assert (first.row_start, first.num_rows) == (0, max(fitting))
        assert (first.key_start, first.key_stop) == (0, 100 + max(fitting))


def test_as_many_rows_as_may_be_paged_are_paged() -> None:
    """Two requests of 3 rows each are met together up to max_paged_rows, apart beyond."""
    geometry = build_geometry([3, 3], [20, 20], {"tokens": [[1, 2], [3, 4]]}, 16)
    for most, kinds in ((3, {PagedScoreChunk}), (2, {ContiguousScoreChunk})):
        capabilities = Capabilities(max_paged_rows=most)
        plan = plan_step(geometry, DIMS, capabilities, policy=NEVER)
        assert {type(chunk) for chunk in plan.score_chunks} == kinds


def test_the_smallest_budget_is_one() -> None:
    assert Budget(score_bytes=1, context_rows=1).context_rows == 1
    for fields in ({"score_bytes": 0}, {"context_rows": 0}, {"score_bytes": -1}):
        with pytest.raises(ConfigError):
            Budget(**fields)


def test_a_context_of_odd_size_is_cut_at_whole_pages_below_it() -> None:
    geometry = build_geometry([9], [70], {"tokens": [[1, 2, 3, 4, 5]]}, 16)
    dims = replace(DIMS, index_topk=80)
    for rows, step in ((16, 16), (31, 16), (32, 32), (47, 32)):
        plan = plan_step(geometry, dims, budget=Budget(context_rows=rows), policy=ALWAYS)
        ranges = [(c.gathers[0].start, c.gathers[0].stop) for c in plan.context_chunks]
        assert ranges == [(key, min(key + step, 70)) for key in range(0, 70, step)]
