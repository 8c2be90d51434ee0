"""Selection of keys: scores and top-k over the plan's chunks; every chunking gives one answer.

In:  index queries and head weights on the plan's sparse rows, the pool of index keys.
Out: a Selection on the same rows. Which rows need scores, and against which keys at once, is the
plan's decision (plan.score_chunks); a row that sees at most K keys keeps its causal list, and is
flagged by no NaN: its choice hangs on no score.
Where the keys of some rows come in several chunks, the K + 1 best so far are carried along, in
order of position, so that ties and the margin at the edge come out as from one piece.
Not here: the scores and the top-k themselves (kernels), one provider's joined kernels for them
(select_fused.py, taken where they are bound), attention (attend.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry, PageTable, RowTensor, require_axis
from gnomon.attention.indices import HeldSlots, KeySet, ListSegment, Space
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.select_fused import FusedSource, can_fuse, select_fused
from gnomon.attention.ops.values import Selection, TopK
from gnomon.attention.plan import ContiguousScoreChunk, ScoreChunk, StepPlan
from gnomon.attention.score_runs import ListPlan, ScoreRun, plan_lists
from gnomon.errors import GeometryError

Kernels = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class SelectKernels:
    """Kernels by operator, and fusions by name (ops/fusions.py; none: the parts run)."""

    kernels: Kernels
    fusions: Kernels


@dataclass(frozen=True, slots=True)
class _Source:
    """What the chunks of a run are scored from: query [M, Hi, Di], weights [M, Hi]."""

    kernels: Kernels
    query: Tensor
    weights: Tensor
    pool: PagedPool
    table: PageTable
    request: Tensor

    def score(self, chunk: ScoreChunk, count: Tensor) -> Tensor:
        """Scores [M, n] of one chunk, of whose keys a row sees the first count[m]."""
        query, weights, pool = self.query, self.weights, self.pool
        scale = (query.shape[1] * query.shape[2]) ** -0.5
        if isinstance(chunk, ContiguousScoreChunk):
            pages, num_keys = self.table.pages[chunk.request], chunk.key_stop - chunk.key_start
            keys = self.kernels["context_gather"](pool, pages, chunk.key_start, num_keys)
            scores: Tensor = self.kernels["index_scores"](query, weights, keys, count, scale)
            return scores
        first_page, skipped = divmod(chunk.key_start, self.table.page_size)
        pages = self.table.pages[:, first_page : -(-chunk.key_stop // self.table.page_size)]
        pages = pages.index_select(0, self.request)
        seen = count + skipped if skipped else count
        scores = self.kernels["index_scores_paged"](query, weights, pool, pages, seen, scale)
        return scores[:, skipped:]


@dataclass(slots=True)
class _Best:
    """The K + 1 best keys so far of the rows of a run of chunks: raw scores and positions."""

    scores: Tensor
    positions: Tensor


def select_keys(
    bound: SelectKernels,
    query: RowTensor,
    head_weights: RowTensor,
    pool: PagedPool,
    geometry: Geometry,
    plan: StepPlan,
    want_margin: bool,
) -> Selection:
    """Exact top-K lists for every sparse row. Raises GeometryError for rows of another axis."""
    axis = query.axis
    if plan.sparse is None:
        raise GeometryError(f"index_select: the plan of '{plan.axis.label}' has no sparse rows")
    if axis is not plan.sparse.axis or geometry.rows is not plan.axis:
        require_axis(plan.sparse.axis, query=query)
        raise GeometryError(
            f"index_select: the plan is of '{plan.axis.label}', the geometry of "
            f"'{geometry.rows.label}'; plan the geometry that is run"
        )
    lists = plan.lists or plan_lists(axis, plan.score_chunks, plan.index_width)
    table, k = geometry.tables[plan.group], plan.dims.index_topk

    def source_of(run: ScoreRun) -> _Source:
        rows = run.take(query.data), run.take(head_weights.data)
        return _Source(bound.kernels, *rows, pool, table, run.request)

    if can_fuse(bound.fusions, table, lists, k):
        rows = query.data, head_weights.data
        by_parts = lambda run, chunk, count: source_of(run).score(chunk, count)  # noqa: E731
        source = FusedSource(bound.fusions, *rows, pool, table, axis.request, by_parts)
        best = select_fused(source, lists, plan.index_width, want_margin)
        ids, margin, nan_rows, slots = best.ids, best.margin, best.nan_rows, best.slots
        held = None if slots is None else HeldSlots(ids, table.pages, slots)
    else:
        found = [(run, _select_run(source_of(run), run, k, want_margin)) for run in lists.runs]
        ids, margin, nan_rows = _joined(found, lists, query.data, want_margin)
        if not axis.is_exact:  # scored by bounds: also rows that take all their keys
            nan_rows = nan_rows & (axis.kv_len > k)
        held = None
    segment = ListSegment(plan.group, Space.POSITION, ids, lists.count, held)
    return Selection(KeySet(axis, (segment,)), margin, nan_rows)


def _joined(
    found: list[tuple[ScoreRun, TopK]], lists: ListPlan, query: Tensor, want_margin: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(ids, margin, nan_rows) of all rows; a row that no run scored keeps its causal list."""
    if lists.causal is None:
        best = found[0][1]
        return best.ids, best.margin, best.nan_rows
    ids, margin = lists.causal.clone(), None
    nan_rows = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    if want_margin:
        dtype = torch.promote_types(query.dtype, torch.float32)
        margin = torch.full(ids.shape[:1], torch.inf, dtype=dtype, device=ids.device)
    for run, best in found:
        run.put(ids, best.ids)
        run.put(nan_rows, best.nan_rows)
        if margin is not None and best.margin is not None:
            run.put(margin, best.margin)
    return ids, margin, nan_rows


def _select_run(source: _Source, run: ScoreRun, k: int, want_margin: bool) -> TopK:
    count = run.counts[0]
    scores = source.score(run.chunks[0], count)
    if len(run.chunks) == 1:
        one: TopK = source.kernels["topk"](scores, count, k, want_margin)
        return one
    columns = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    best = _Best(scores, columns.expand(scores.shape[0], -1))
    nan_rows = torch.zeros_like(count, dtype=torch.bool)
    for chunk, seen in zip(run.chunks[1:], run.counts[1:], strict=True):
        best, has_nan = _keep_best(source.kernels, best, count, k)
        nan_rows |= has_nan
        scores = source.score(chunk, seen)
        columns = torch.arange(
            chunk.key_start, chunk.key_stop, dtype=torch.int32, device=scores.device
        ).expand(scores.shape[0], -1)
        count = count.clamp_max(best.scores.shape[1]) + seen
        best = _Best(torch.cat((best.scores, scores), 1), torch.cat((best.positions, columns), 1))
    last: TopK = source.kernels["topk"](best.scores, count, k, want_margin)
    chosen = best.positions.gather(1, last.ids.clamp_min(0).long())
    chosen = chosen.masked_fill(last.ids < 0, -1)
    return TopK(chosen, last.count, last.margin, nan_rows | last.nan_rows)


def _keep_best(kernels: Kernels, best: _Best, count: Tensor, k: int) -> tuple[_Best, Tensor]:
    """Reduce to K + 1 columns. Rows with fewer see all keys so far: no gap before a later key."""
    if best.scores.shape[1] <= k + 1:
        return best, torch.zeros_like(count, dtype=torch.bool)
    kept: TopK = kernels["topk"](best.scores, count, k + 1)
    columns = kept.ids.clamp_min(0).long()
    scores = best.scores.gather(1, columns).masked_fill(kept.ids < 0, -torch.inf)
    return _Best(scores, best.positions.gather(1, columns)), kept.nan_rows
