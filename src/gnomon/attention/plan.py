"""The plan of a step: everything that attention decides, decided once, from exact host integers.

In:  a Geometry, the model's dims, what the providers need, byte budgets, what ranks agreed on.
Out: ``StepPlan``, frozen. Operators follow its routes and chunks and decide nothing again.
Not here: which provider runs (dispatch.py), the loop over chunks (ops), memory (arena).

Chunk lists come from score_chunks.py and context_chunks.py. Chunk rows count from the first row
of the subset's own axis (``plan.sparse.axis`` for scores, ``plan.dense.axis`` for context).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gnomon.attention.axes import RowAxis, take_axis
from gnomon.attention.context_chunks import ContextChunk, context_bytes, plan_context
from gnomon.attention.geometry import Geometry
from gnomon.attention.plan_limits import Budget, Capabilities
from gnomon.attention.routes import (
    AttentionDims,
    DensePolicy,
    Route,
    RoutePolicy,
    choose_routes,
)
from gnomon.attention.row_tensor import RowSubset
from gnomon.attention.score_chunks import (
    ContiguousScoreChunk,
    PagedScoreChunk,
    ScoreChunk,
    plan_scores,
    score_bytes,
)
from gnomon.attention.score_runs import ListPlan, plan_lists
from gnomon.errors import GeometryError

__all__ = [
    "Budget",
    "Capabilities",
    "ContextChunk",
    "ContiguousScoreChunk",
    "GraphKey",
    "PagedScoreChunk",
    "ScoreChunk",
    "StepPlan",
    "SyncNeeds",
    "agree",
    "plan_step",
    "sync_needs",
]


@dataclass(frozen=True, slots=True)
class SyncNeeds:
    """What ranks must agree on before a step, exchanged as three numbers; zero rows are legal.

    bucket: rows after padding. all_decode: every request has at most max_decode_rows rows, so a
    decode graph may run. allow_dense: every rank may take routes of its own choice; False where
    the routes involve collectives that all ranks must enter alike.
    """

    bucket: int
    all_decode: bool
    allow_dense: bool = True


def sync_needs(geometry: Geometry, policy: RoutePolicy | None = None) -> SyncNeeds:
    """What this rank would do alone: its rows, and whether all its requests decode."""
    most = (policy or RoutePolicy()).max_decode_rows
    all_decode = max(geometry.requests.host.query_len, default=0) <= most
    return SyncNeeds(geometry.rows.num_rows, all_decode)


def agree(needs: Sequence[SyncNeeds]) -> SyncNeeds:
    """The step of all ranks: the largest bucket, and only what every rank allows."""
    return SyncNeeds(
        bucket=max((need.bucket for need in needs), default=0),
        all_decode=all(need.all_decode for need in needs),
        allow_dense=all(need.allow_dense for need in needs),
    )


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Two steps with one key can replay one captured graph."""

    num_rows: int
    num_requests: int
    index_width: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """``axis``: the rows that were planned; a consumer's geometry must have this very axis.

    routes: of each request. sparse: the rows of the SPARSE route, or None if no live row takes
    it; it is the whole axis (rows is None) where no request is DENSE. dense: likewise.
    group: cache group of latents and index keys. index_width: W of the index lists, at most
    index_topk, at least every count. score_chunks: rows of ``sparse.axis`` that need scores;
    every other sparse row sees at most index_topk keys and takes them all. Chunks of one row
    follow each other with ascending keys. lists: what the layers' index lists share; None without
    sparse rows, and where the device alone knows the lengths, which then may change under a plan.
    context_chunks: for ``dense.axis``. scratch_bytes: the most that one chunk takes (chunks run
    one after another). graph_key: None where shapes depend on host lengths.
    """

    axis: RowAxis
    dims: AttentionDims
    group: str
    routes: tuple[Route, ...]
    sparse: RowSubset | None
    dense: RowSubset | None
    index_width: int
    score_chunks: tuple[ScoreChunk, ...]
    lists: ListPlan | None
    context_chunks: tuple[ContextChunk, ...]
    scratch_bytes: int
    bucket: int
    graph_key: GraphKey | None


def plan_step(
    geometry: Geometry,
    dims: AttentionDims,
    capabilities: Capabilities | None = None,
    budget: Budget | None = None,
    sync: SyncNeeds | None = None,
    policy: RoutePolicy | None = None,
    group: str = "tokens",
) -> StepPlan:
    """Plan one step; pure, no device syncs.

    Raises GeometryError if a route hangs on an inexact length, if the rows were not padded to the
    bucket of ``sync``, or if ``group`` lacks its page table; ConfigError if the budget is too low.
    """
    capabilities, budget = capabilities or Capabilities(), budget or Budget()
    policy, axis = policy or RoutePolicy(), geometry.rows
    if sync is not None and sync.bucket != axis.num_rows:
        raise GeometryError(
            f"the ranks agreed on {sync.bucket} rows, '{axis.label}' has {axis.num_rows}; "
            "pad_rows() to the bucket before planning"
        )
    if not capabilities.has_dense or (sync is not None and not sync.allow_dense):
        policy = RoutePolicy(DensePolicy.NEVER, policy.max_decode_rows)
    routes = choose_routes(geometry.requests.host, dims, policy)
    sparse, dense = _subsets(axis, routes)
    longest = 0 if sparse is None else _longest(sparse.axis)
    scores, context = tuple[ScoreChunk, ...](), tuple[ContextChunk, ...]()
    if sparse is not None and 0 < dims.index_topk < longest:
        scores = plan_scores(sparse.axis, dims, capabilities, budget, _page_size(geometry, group))
    if dense is not None:
        context = plan_context(dense.axis, dims, capabilities, budget, _page_size(geometry, group))
    scratch = [score_bytes(chunk, dims, capabilities) for chunk in scores]
    scratch += [context_bytes(chunk, dims, capabilities) for chunk in context]
    width = _list_width(longest, dims, capabilities)
    all_decode = (sync or sync_needs(geometry, policy)).all_decode
    return StepPlan(
        axis=axis,
        dims=dims,
        group=group,
        routes=routes,
        sparse=sparse,
        dense=dense,
        index_width=width,
        score_chunks=scores,
        lists=plan_lists(sparse.axis, scores, width) if sparse and sparse.axis.is_exact else None,
        context_chunks=context,
        scratch_bytes=max(scratch, default=0),
        bucket=axis.num_rows,
        graph_key=_graph_key(axis, routes, dims, width) if all_decode else None,
    )


def _graph_key(
    axis: RowAxis, routes: tuple[Route, ...], dims: AttentionDims, width: int
) -> GraphKey:
    """Captured lists are as wide as any can get, so that lengths are no part of a key."""
    return GraphKey(axis.num_rows, len(routes), dims.index_topk or width)


def _list_width(longest: int, dims: AttentionDims, capabilities: Capabilities) -> int:
    """Of index lists; ``longest``: keys of the row that has the most."""
    most = dims.index_topk or longest
    return most if capabilities.has_fixed_width else min(longest, most)


def _longest(axis: RowAxis) -> int:
    return max((span.last_position + 1 for span in axis.spans), default=0)


def _page_size(geometry: Geometry, group: str) -> int:
    if group not in geometry.tables:
        raise GeometryError(
            f"the plan needs the page table of cache group '{group}', which this geometry lacks; "
            "pass group= the group of the latents and index keys"
        )
    return geometry.tables[group].page_size


def _subsets(axis: RowAxis, routes: tuple[Route, ...]) -> tuple[RowSubset | None, RowSubset | None]:
    """(sparse, dense). Padding rows belong to the sparse rows only if no row is dense."""
    has_dense = any(routes[span.request] is Route.DENSE for span in axis.spans)
    if not has_dense:
        return RowSubset(axis, axis, None), None
    if all(routes[span.request] is Route.DENSE for span in axis.spans):
        if axis.num_live == axis.num_rows:
            return None, RowSubset(axis, axis, None)
        return None, _subset(axis, routes, Route.DENSE)
    return _subset(axis, routes, Route.SPARSE), _subset(axis, routes, Route.DENSE)


def _subset(axis: RowAxis, routes: tuple[Route, ...], route: Route) -> RowSubset:
    rows = np.concatenate(
        [
            np.arange(span.start, span.stop, dtype=np.int64)
            for span in axis.spans
            if routes[span.request] is route
        ]
    )
    label = f"{axis.label} > {route} {len(rows)} of {axis.num_rows}"
    index = torch.from_numpy(rows).to(axis.device, non_blocking=True)
    return RowSubset(axis, take_axis(axis, rows, label), index)
