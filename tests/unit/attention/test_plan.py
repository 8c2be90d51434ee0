"""Plans cover every visible (row, key) pair exactly once, within their budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.context_chunks import context_bytes
from gnomon.attention.geometry import Geometry, RowSubset, RowTensor, build_geometry
from gnomon.attention.plan import (
    Budget,
    Capabilities,
    ContiguousScoreChunk,
    PagedScoreChunk,
    StepPlan,
    SyncNeeds,
    agree,
    plan_step,
    sync_needs,
)
from gnomon.attention.routes import AttentionDims, DensePolicy, Route, RoutePolicy
from gnomon.attention.score_chunks import score_bytes
from gnomon.attention.transforms import ShardStrategy, advance, pad_rows, shard_rows
from gnomon.errors import ConfigError, GeometryError
from tests.unit.attention.steps import Step, geometry_of, steps, tokens_of

DIMS = AttentionDims(2, 8, 4, 2, 4, index_topk=6, index_num_heads=3, index_head_dim=5)
NEVER, ALWAYS = RoutePolicy(DensePolicy.NEVER), RoutePolicy(DensePolicy.ALWAYS)


@st.composite
def planned(draw: st.DrawFn) -> tuple[Geometry, StepPlan, Budget, Capabilities]:
    """A step, perhaps padded or one rank's shard, with a plan under a small budget."""
    step: Step = draw(steps(most=30))
    geometry = pad_rows(geometry_of(step), len(step.rows) + draw(st.sampled_from([0, 0, 5])))
    if draw(st.booleans()):
        size = draw(st.integers(1, 4))
        strategy = draw(st.sampled_from(list(ShardStrategy)))
        geometry = shard_rows(geometry, draw(st.integers(0, size - 1)), size, strategy)
    budget = Budget(
        score_bytes=draw(st.sampled_from([40, 100, 500, 2000, 10**6])),
        context_rows=draw(st.sampled_from([16, 17, 40, 1000])),
    )
    capabilities = Capabilities(
        holds_head_scores=draw(st.booleans()),
        holds_paged_keys=draw(st.booleans()),
        holds_dense_scores=draw(st.booleans()),
        max_paged_rows=draw(st.sampled_from([0, 1, 4])),
    )
    policy = RoutePolicy(draw(st.sampled_from(list(DensePolicy))))
    return (
        geometry,
        plan_step(geometry, DIMS, capabilities, budget, None, policy),
        budget,
        capabilities,
    )


@given(planned())
def test_score_chunks_cover_what_needs_scores_once(
    case: tuple[Geometry, StepPlan, Budget, Capabilities],
) -> None:
    _, plan, budget, capabilities = case
    if plan.sparse is None:
        assert plan.score_chunks == ()
        return
    rows = tokens_of(plan.sparse.axis)
    met: Counter[tuple[int, int]] = Counter()
    last_key = dict.fromkeys(range(len(rows)), 0)
    for chunk in plan.score_chunks:
        assert (
            0
            < score_bytes(chunk, DIMS, capabilities)
            <= min(budget.score_bytes, plan.scratch_bytes)
        )
        if isinstance(chunk, ContiguousScoreChunk):
            chunk_rows = list(range(chunk.row_start, chunk.row_stop))
            assert {rows[row][0] for row in chunk_rows} == {chunk.request}
        else:
            chunk_rows = list(chunk.rows)
        longest = max(rows[row][1] + 1 for row in chunk_rows)
        assert chunk.key_stop <= longest
        for row in chunk_rows:
            assert chunk.key_start == last_key[row]  # ascending, no gap, no overlap
            last_key[row] = chunk.key_stop
            met.update((row, key) for key in range(chunk.key_start, chunk.key_stop))
    for row, token in enumerate(rows):
        kv_len = 0 if token is None else token[1] + 1
        needs = kv_len > plan.dims.index_topk
        assert (last_key[row] >= kv_len) if needs else last_key[row] == 0
    assert set(met.values()) <= {1}


@given(planned())
def test_paged_chunks_are_at_most_half_padding(
    case: tuple[Geometry, StepPlan, Budget, Capabilities],
) -> None:
    _, plan, _, _ = case
    for chunk in plan.score_chunks:
        if isinstance(chunk, PagedScoreChunk):
            assert plan.sparse is not None
            rows = tokens_of(plan.sparse.axis)
            useful = [rows[row][1] + 1 for row in chunk.rows]
            assert 2 * min(useful) >= chunk.max_entries
            spans = plan.sparse.axis.spans  # a zig-zag shard has several of one request
            assert sum(any(s.start <= r < s.stop for r in chunk.rows) for s in spans) > 1


@given(planned())
def test_context_chunks_cover_every_visible_pair_once(
    case: tuple[Geometry, StepPlan, Budget, Capabilities],
) -> None:
    geometry, plan, budget, capabilities = case
    if plan.dense is None:
        assert plan.context_chunks == ()
        return
    page_size = geometry.tables["tokens"].page_size
    rows = tokens_of(plan.dense.axis)
    met: Counter[tuple[int, int]] = Counter()
    for chunk in plan.context_chunks:
        assert 0 < chunk.num_keys <= budget.context_rows
        assert context_bytes(chunk, DIMS, capabilities) <= plan.scratch_bytes
        place = 0
        workspace: list[tuple[int, int]] = []
        for gather in chunk.gathers:
            assert gather.offset == place
            workspace += [(gather.request, key) for key in range(gather.start, gather.stop)]
            place = len(workspace)
            assert gather.start % page_size == 0
        in_chunk: Counter[int] = Counter()
        for piece in chunk.pieces:
            keys = workspace[piece.key_offset : piece.key_offset + piece.num_keys]
            assert keys == [(piece.request, k) for k in range(piece.key_start, piece.key_stop)]
            if capabilities.holds_dense_scores and piece.num_rows > 1:
                held = 4 * DIMS.num_heads * piece.num_rows * piece.num_keys
                assert held <= budget.score_bytes
            for row in range(piece.row_start, piece.row_stop):
                in_chunk[row] += 1
                assert rows[row] is not None
                request, position = rows[row]
                assert request == piece.request
                visible = min(max(position + 1 - piece.key_start, 0), piece.num_keys)
                met.update((row, key) for _, key in keys[:visible])
        assert set(in_chunk.values()) == {1}  # at most one merge a row and chunk
    expected = {(row, k) for row, token in enumerate(rows) if token for k in range(token[1] + 1)}
    assert set(met) == expected
    assert set(met.values()) <= {1}


@given(planned())
def test_subsets_are_the_rows_of_their_route(
    case: tuple[Geometry, StepPlan, Budget, Capabilities],
) -> None:
    geometry, plan, _, _ = case
    rows = tokens_of(geometry.rows)
    held: list[object] = []
    for subset, route in ((plan.sparse, Route.SPARSE), (plan.dense, Route.DENSE)):
        if subset is not None:
            live = [token for token in tokens_of(subset.axis) if token]
            assert live == [token for token in rows if token and plan.routes[token[0]] is route]
            held += live
    assert len(held) == geometry.rows.num_live
    value = RowTensor(geometry.rows, geometry.rows.kv_len + 100 * geometry.rows.position)
    parts = [(s, s.take(value)) for s in (plan.sparse, plan.dense) if s is not None]
    restored = RowSubset.restore(geometry.rows, parts)
    assert restored.axis is geometry.rows
    assert torch.equal(restored.data, value.data)
    longest = 0
    if plan.sparse is not None:
        longest = max((token[1] + 1 for token in tokens_of(plan.sparse.axis) if token), default=0)
    assert plan.index_width == min(longest, plan.dims.index_topk)


def test_decodes_are_batched_and_prefills_are_not() -> None:
    kv_lens = [100, 110, 120, 400, 90, 3, 150]
    queries = [1, 1, 1, 1, 1, 1, 50]
    pages = np.arange(1, 1 + 7 * 32).reshape(7, 32)
    plan = plan_step(build_geometry(queries, kv_lens, {"tokens": pages}, 16), DIMS)
    assert plan.score_chunks == (
        ContiguousScoreChunk(6, 6, 56, 0, 150),
        ContiguousScoreChunk(3, 3, 4, 0, 400),
        PagedScoreChunk((0, 1, 2, 4), 0, 120),
    )
    assert plan.sparse is not None
    assert plan.sparse.axis is plan.axis
    assert plan.graph_key is None
    assert plan.index_width == 6


def test_a_chunk_that_straddles_topk_scores_its_later_rows_only() -> None:
    geometry = build_geometry([20], [20], {"tokens": [[1, 2]]}, 16)
    plan = plan_step(geometry, DIMS, policy=NEVER)
    assert plan.score_chunks == (ContiguousScoreChunk(0, 6, 20, 0, 20),)
    short = plan_step(build_geometry([6], [6], {"tokens": [[1]]}, 16), DIMS, policy=NEVER)
    assert short.score_chunks == ()
    assert short.scratch_bytes == 0


def test_keys_are_chunked_at_pages_when_one_block_of_rows_is_too_much() -> None:
    geometry = build_geometry([16], [1000], {"tokens": [list(range(1, 64))]}, 16)
    plan = plan_step(geometry, DIMS, budget=Budget(score_bytes=4 * 300 * (16 * 4 + 5)))
    ranges = [(chunk.key_start, chunk.key_stop) for chunk in plan.score_chunks]
    assert ranges == [(0, 288), (288, 576), (576, 864), (864, 1000)]


def test_the_bound_is_memory_not_length() -> None:
    """GLM-5 sizes at 128k tokens: no chunk passes 64 MiB, and a row is never cut too thin."""
    dims = AttentionDims(64, 512, 192, 64, 256, 2048, 32, 128)
    pages = np.arange(1, 1 + 2048)[None]
    geometry = build_geometry([2048], [131072], {"tokens": pages}, 64)
    for holds in (True, False):
        capabilities = Capabilities(holds_head_scores=holds)
        plan = plan_step(geometry, dims, capabilities)
        assert plan.scratch_bytes <= 64 << 20
        assert all(
            isinstance(c, ContiguousScoreChunk) and c.num_rows >= 16 for c in plan.score_chunks
        )


def test_packing_puts_short_prompts_into_one_chunk() -> None:
    lens = [5, 6, 3, 4]
    geometry = build_geometry(lens, lens, {"tokens": [[b + 1] for b in range(4)]}, 16)
    plan = plan_step(geometry, DIMS, budget=Budget(context_rows=16), policy=ALWAYS)
    assert [chunk.num_keys for chunk in plan.context_chunks] == [14, 4]
    assert [len(chunk.pieces) for chunk in plan.context_chunks] == [3, 1]
    assert plan.sparse is None
    assert plan.dense is not None
    assert plan.dense.axis is geometry.rows


def test_a_long_context_is_cut_at_pages_into_chunks_of_its_own() -> None:
    dims = replace(DIMS, index_topk=64)
    geometry = build_geometry([2, 9], [4, 37], {"tokens": [[1], [2, 3, 4]]}, 16)
    plan = plan_step(geometry, dims, budget=Budget(context_rows=20), policy=ALWAYS)
    ranges = [[(g.request, g.start, g.stop) for g in c.gathers] for c in plan.context_chunks]
    assert ranges == [[(0, 0, 4)], [(1, 0, 16)], [(1, 16, 32)], [(1, 32, 37)]]
    last = plan.context_chunks[-1].pieces
    assert [(p.row_start, p.row_stop) for p in last] == [(6, 11)]  # rows that see key 32 or more


def test_mixed_steps_hold_both_routes() -> None:
    """The third motivating fault: each subset carries exactly its own rows."""
    tables = {"tokens": [[1], [2], [3, 4]]}
    geometry = pad_rows(build_geometry([1, 5, 1], [9, 5, 20], tables, 16, label="step 12"), 10)
    plan = plan_step(geometry, DIMS)
    assert plan.routes == (Route.SPARSE, Route.DENSE, Route.SPARSE)
    assert plan.sparse is not None
    assert plan.dense is not None
    assert tokens_of(plan.sparse.axis) == [(0, 8), (2, 19)]
    assert tokens_of(plan.dense.axis) == [(1, p) for p in range(5)]
    assert plan.sparse.axis.label == "step 12 > pad 10 > sparse 2 of 10"
    ones = torch.ones(10, 3)
    parts = [(s, s.take(RowTensor(geometry.rows, ones))) for s in (plan.sparse, plan.dense)]
    assert RowSubset.restore(geometry.rows, parts).data.sum(1).tolist() == [3.0] * 7 + [0.0] * 3


def test_ranks_agree_and_zero_rows_are_legal() -> None:
    busy = build_geometry([1, 4], [9, 4], {"tokens": [[1], [2]]}, 16)
    idle = build_geometry([], [], {"tokens": []}, 16)
    needs = agree([sync_needs(busy), sync_needs(idle), SyncNeeds(3, True, allow_dense=False)])
    assert needs == SyncNeeds(5, all_decode=False, allow_dense=False)
    with pytest.raises(GeometryError, match=r"agreed on 5 rows, .* has 0; pad_rows"):
        plan_step(idle, DIMS, sync=needs)
    plan = plan_step(pad_rows(idle, 5), DIMS, sync=needs)
    assert (plan.bucket, plan.score_chunks, plan.context_chunks) == (5, (), ())
    assert plan.sparse is not None
    assert plan.sparse.axis is plan.axis
    assert plan_step(busy, DIMS, sync=needs).routes == (Route.SPARSE, Route.SPARSE)
    alone = plan_step(idle, DIMS)
    assert alone.graph_key is not None
    assert alone.index_width == 0


def test_upper_bounds_size_chunks_but_decide_nothing() -> None:
    geometry = build_geometry([3, 3], [9, 20], {"tokens": [[1], [2, 3]]}, 16)
    advanced = advance(geometry, torch.tensor([1, 2]))
    with pytest.raises(GeometryError, match="only an upper bound"):
        plan_step(advanced, DIMS)
    plan = plan_step(advanced, DIMS, policy=NEVER)
    rows = {row for c in plan.score_chunks for row in range(c.row_start, c.row_stop)}
    assert rows == set(range(6))


def test_bad_budgets_and_missing_tables_are_named() -> None:
    geometry = build_geometry([20, 5], [20, 5], {"tokens": [[1, 2], [3]]}, 16)
    with pytest.raises(ConfigError, match=r"36 bytes; raise Budget\.score_bytes"):
        plan_step(geometry, DIMS, budget=Budget(score_bytes=35))
    with pytest.raises(ConfigError, match=r"context_rows is 15; at least a page, 16"):
        plan_step(geometry, DIMS, budget=Budget(context_rows=15))
    with pytest.raises(ConfigError, match="score_bytes 0"):
        Budget(score_bytes=0)
    for policy in (NEVER, ALWAYS):
        with pytest.raises(GeometryError, match="page table of cache group 'latents'"):
            plan_step(geometry, DIMS, policy=policy, group="latents")
