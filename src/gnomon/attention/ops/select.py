"""Selection of keys: scores and top-k over the plan's chunks; every chunking gives one answer.

In:  index queries and head weights on the plan's sparse rows, the pool of index keys.
Out: a Selection on the same rows. Which rows need scores, and against which keys at once, is the
plan's decision (plan.score_chunks); a row that sees at most K keys keeps its causal list.
Where the keys of some rows come in several chunks, the K + 1 best so far are carried along, in
order of position, so that ties and the margin at the edge come out as from one piece.
Not here: the scores and the top-k themselves (kernels), attention (attend.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.geometry import Geometry, PageTable, RowTensor, require_axis
from gnomon.attention.indices import KeySet, ListSegment, Space, causal_list
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import Selection, TopK
from gnomon.attention.plan import ContiguousScoreChunk, PagedScoreChunk, ScoreChunk, StepPlan
from gnomon.errors import GeometryError

Kernels = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class _Source:
    """What all chunks of a step are scored from."""

    kernels: Kernels
    axis: RowAxis
    query: Tensor
    weights: Tensor
    pool: PagedPool
    table: PageTable
    scale: float

    def take(self, rows: Tensor | slice, value: Tensor) -> Tensor:
        if not isinstance(rows, slice):
            return value.index_select(0, rows)
        is_whole = rows.stop - rows.start == value.shape[0]
        return value if is_whole else value[rows]

    def score(self, chunk: ScoreChunk, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """(scores [M, n], count [M] of leading columns that a row sees) of one chunk."""
        query, weights = self.take(rows, self.query), self.take(rows, self.weights)
        kv_len = self.take(rows, self.axis.kv_len)
        num_keys = chunk.key_stop - chunk.key_start
        if isinstance(chunk, ContiguousScoreChunk):
            pages = self.table.pages[chunk.request]
            keys = self.kernels["context_gather"](self.pool, pages, chunk.key_start, num_keys)
            count = (kv_len - chunk.key_start).clamp_(0, num_keys)
            scores = self.kernels["index_scores"](query, weights, keys, count, self.scale)
            return scores, count
        size = self.table.page_size
        first_page, skipped = divmod(chunk.key_start, size)
        pages = self.table.pages[:, first_page : -(-chunk.key_stop // size)]
        pages = pages.index_select(0, self.take(rows, self.axis.request).clamp_min(0))
        seen = kv_len.clamp_max(chunk.key_stop) - first_page * size
        scores = self.kernels["index_scores_paged"](
            query, weights, self.pool, pages, seen.clamp_min(0), self.scale
        )
        return scores[:, skipped:], (seen - skipped).clamp_min_(0)


@dataclass(slots=True)
class _Best:
    """The K + 1 best keys so far of the rows of a run of chunks: raw scores and positions."""

    scores: Tensor
    positions: Tensor


def select_keys(
    kernels: Kernels,
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
    margin_dtype = torch.promote_types(query.data.dtype, torch.float32) if want_margin else None
    if not plan.score_chunks:
        return _selection(axis, plan, *_unscored(axis, plan, margin_dtype))
    source = _Source(
        kernels,
        axis,
        query.data,
        head_weights.data,
        pool,
        geometry.tables[plan.group],
        query.data[0].numel() ** -0.5,
    )
    k, runs = plan.dims.index_topk, _runs(plan.score_chunks)
    first_rows = _rows_of(runs[0][0], axis)
    if len(runs) == 1 and isinstance(first_rows, slice) and first_rows == slice(0, axis.num_rows):
        best = _select_run(source, runs[0], first_rows, k, want_margin)
        return _selection(axis, plan, best.ids, best.margin, best.nan_rows)
    ids, margin, nan_rows = _unscored(axis, plan, margin_dtype)
    for run in runs:
        rows = _rows_of(run[0], axis)
        best = _select_run(source, run, rows, k, want_margin)
        _put(ids, rows, best.ids)
        _put(nan_rows, rows, best.nan_rows)
        if margin is not None and best.margin is not None:
            _put(margin, rows, best.margin)
    return _selection(axis, plan, ids, margin, nan_rows)


def _unscored(
    axis: RowAxis, plan: StepPlan, margin_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(ids, margin, nan_rows) before any score: causal lists, nothing cut, nothing NaN."""
    margin = None
    if margin_dtype is not None:
        margin = torch.full((axis.num_rows,), torch.inf, dtype=margin_dtype, device=axis.device)
    nan_rows = torch.zeros(axis.num_rows, dtype=torch.bool, device=axis.device)
    return causal_list(axis, plan.group, plan.index_width).ids, margin, nan_rows


def _selection(
    axis: RowAxis, plan: StepPlan, ids: Tensor, margin: Tensor | None, nan_rows: Tensor
) -> Selection:
    count = axis.kv_len.clamp_max(plan.index_width)
    segment = ListSegment(plan.group, Space.POSITION, ids, count)
    return Selection(KeySet(axis, (segment,)), margin, nan_rows)


def _runs(chunks: tuple[ScoreChunk, ...]) -> list[list[ScoreChunk]]:
    """Chunks of the same rows, one list each; a chunk that starts at key 0 begins a new run."""
    runs: list[list[ScoreChunk]] = []
    for chunk in chunks:
        if chunk.key_start == 0:
            runs.append([])
        runs[-1].append(chunk)
    return runs


def _rows_of(chunk: ScoreChunk, axis: RowAxis) -> Tensor | slice:
    if isinstance(chunk, PagedScoreChunk):
        if len(chunk.rows) == axis.num_rows:
            return slice(0, axis.num_rows)
        return torch.tensor(chunk.rows, dtype=torch.int64, device=axis.device)
    return slice(chunk.row_start, chunk.row_stop)


def _put(target: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    if isinstance(rows, slice):
        target[rows] = values
    else:
        target.index_copy_(0, rows, values)


def _select_run(
    source: _Source, run: list[ScoreChunk], rows: Tensor | slice, k: int, want_margin: bool
) -> TopK:
    scores, count = source.score(run[0], rows)
    if len(run) == 1:
        one: TopK = source.kernels["topk"](scores, count, k, want_margin)
        return one
    columns = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    best = _Best(scores, columns.expand(scores.shape[0], -1))
    nan_rows = torch.zeros_like(count, dtype=torch.bool)
    for chunk in run[1:]:
        best, has_nan = _keep_best(source.kernels, best, count, k)
        nan_rows |= has_nan
        scores, seen = source.score(chunk, rows)
        columns = torch.arange(chunk.key_start, chunk.key_stop, dtype=torch.int32)
        columns = columns.to(scores.device).expand(scores.shape[0], -1)
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
