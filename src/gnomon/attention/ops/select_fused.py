"""Selection by joined kernels: scores that stop at a row's count, lists that know their slots.

In:  what select.py has: fusions (ops/fusions.py), queries, pool, geometry, the lists' plan.
Out: the same ids, margins and flags as from the parts, and the slots of the ids, so that attention
     converts nothing. No host waits, no shape hangs on a device value: it can be captured.
Which rows: those of a run are scored and cut; a run's row that sees at most K keys gets them all
     without scores. Rows of no run get theirs first.
Not here: runs whose keys come in several chunks (select.py), kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.geometry import PageTable
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import RowPages, TopK
from gnomon.attention.plan import ContiguousScoreChunk, ScoreChunk
from gnomon.attention.score_runs import ListPlan, ScoreRun

Kernels = Mapping[str, Callable[..., Any]]
Score = Callable[[ScoreRun, ScoreChunk, Tensor], Tensor]  # by the parts


@dataclass(frozen=True, slots=True)
class FusedSource:
    """Queries [R, Hi, Di] and head weights [R, Hi] on the lists' rows, and where the keys are.

    ``request`` int32 [R], −1 for padding. ``by_parts``: scores of a run where no fusion has them.
    """

    fusions: Kernels
    query: Tensor
    weights: Tensor
    pool: PagedPool
    table: PageTable
    request: Tensor
    by_parts: Score


def can_fuse(fusions: Kernels, table: PageTable, lists: ListPlan, top: int) -> bool:
    """Whether ``select_fused`` serves these lists; ``top``: K, 0 where a row takes every key."""
    is_whole = all(len(run.chunks) == 1 for run in lists.runs)
    return "topk_slots" in fusions and table.ownership is None and is_whole and top > 0


def select_fused(source: FusedSource, lists: ListPlan, width: int, want_margin: bool) -> TopK:
    """Lists of all rows, ``width`` ids wide, with slots."""
    topk = source.fusions["topk_slots"]
    num_rows = source.request.shape[0]
    whole = _empty(source, num_rows, width, want_margin)
    if len(lists.runs) == 1 and lists.runs[0].rows is None:
        return _run(source, lists.runs[0], (width, want_margin), whole)
    for rows in _unscored(lists, num_rows):
        pages = RowPages(source.table.pages, source.request[rows], source.table.page_size)
        topk(None, lists.count[rows], width, want_margin, pages, _view(whole, rows))
    for run in lists.runs:
        if isinstance(run.rows, Tensor):
            part = _empty(source, run.request.shape[0], width, want_margin)
            _put(run.rows, whole, _run(source, run, (width, want_margin), part))
        else:
            _run(source, run, (width, want_margin), _view(whole, run.rows or slice(None)))
    return whole


def _empty(source: FusedSource, num_rows: int, width: int, want_margin: bool) -> TopK:
    """Room for lists. Slots are int32 where they fit: what libraries take, and half the bytes."""
    device, is_small = source.request.device, source.pool.num_slots <= torch.iinfo(torch.int32).max
    return TopK(
        torch.empty((num_rows, width), dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device) if want_margin else None,
        torch.empty(num_rows, dtype=torch.bool, device=device),
        torch.empty(
            (num_rows, width), dtype=torch.int32 if is_small else torch.int64, device=device
        ),
    )


def _unscored(lists: ListPlan, num_rows: int) -> Iterator[slice]:
    """Rows of no run, as slices; runs of scattered rows are taken for none (they write later)."""
    begin = 0
    taken = [run.rows for run in lists.runs if isinstance(run.rows, slice)]
    for rows in (*sorted(taken, key=lambda rows: rows.start), slice(num_rows, num_rows)):
        if rows.start > begin:
            yield slice(begin, rows.start)
        begin = max(begin, rows.stop)


def _run(source: FusedSource, run: ScoreRun, wanted: tuple[int, bool], out: TopK) -> TopK:
    """Lists of a run's rows, written to ``out``; wanted: width, whether a margin."""
    (width, want_margin), count, table = wanted, run.counts[0], source.table
    rows = RowPages(table.pages, run.request, table.page_size)
    scores = _scores(source, run, rows, width)
    best: TopK = source.fusions["topk_slots"](scores, count, width, want_margin, rows, out)
    return best


def _scores(source: FusedSource, run: ScoreRun, rows: RowPages, width: int) -> Tensor:
    chunk, count, fusions = run.chunks[0], run.counts[0], source.fusions
    is_flat = isinstance(chunk, ContiguousScoreChunk)
    lazy = fusions.get("lazy_scores" if is_flat else "lazy_scores_paged")
    if lazy is None:
        return source.by_parts(run, chunk, count)
    query, weights, pool = run.take(source.query), run.take(source.weights), source.pool
    scale = (query.shape[1] * query.shape[2]) ** -0.5
    if isinstance(chunk, ContiguousScoreChunk):
        pages = source.table.pages[chunk.request]
        flat: Tensor = lazy(query, weights, pool, pages, chunk.key_stop, count, scale)
        return flat
    limits = (chunk.key_stop, width)
    paged: Tensor = lazy(query, weights, pool, rows, count, scale, limits)
    return paged


def _view(whole: TopK, rows: slice) -> TopK:
    margin = None if whole.margin is None else whole.margin[rows]
    assert whole.slots is not None
    return TopK(whole.ids[rows], whole.count[rows], margin, whole.nan_rows[rows], whole.slots[rows])


def _put(rows: Tensor, whole: TopK, part: TopK) -> None:
    pairs = (
        (whole.ids, part.ids),
        (whole.count, part.count),
        (whole.margin, part.margin),
        (whole.nan_rows, part.nan_rows),
        (whole.slots, part.slots),
    )
    for target, value in pairs:
        if target is not None and value is not None:
            target.index_copy_(0, rows, value)
