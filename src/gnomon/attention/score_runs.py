"""What the index lists of a step have in common, whatever the layer: made once, with the plan.

In:  the sparse rows' axis, the plan's score chunks, the width of the lists.
Out: ``ListPlan``: device values that follow from row numbers and lengths alone, so that no layer
     computes them again. Read-only: every layer shares them.
Not here: pages (the page table of the geometry that runs), scores, top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.indices import causal_list
from gnomon.attention.score_chunks import PagedScoreChunk, ScoreChunk

__all__ = ["ListPlan", "ScoreRun", "plan_lists"]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRun:
    """Chunks of the same M rows, keys ascending; the first starts at key 0.

    rows: which rows of the axis, None for all of them. request: int32 [M], 0 for padding rows.
    counts: for each chunk, how many of its keys each row sees, int32 [M].
    """

    rows: slice | Tensor | None
    request: Tensor
    chunks: tuple[ScoreChunk, ...]
    counts: tuple[Tensor, ...]

    def take(self, value: Tensor) -> Tensor:
        """The run's rows of a tensor on the axis."""
        if isinstance(self.rows, Tensor):
            return value.index_select(0, self.rows)
        return value if self.rows is None else value[self.rows]

    def put(self, target: Tensor, value: Tensor) -> None:
        """Write the run's rows of a tensor on the axis."""
        if isinstance(self.rows, Tensor):
            target.index_copy_(0, self.rows, value)
        else:
            target[self.rows or slice(None)] = value


@dataclass(frozen=True, slots=True, eq=False)
class ListPlan:
    """``count`` int32 [R]: ids in each row's list. ``causal`` int32 [R, W]: the lists of rows that
    no run scores, or None where one run scores all rows.
    """

    count: Tensor
    runs: tuple[ScoreRun, ...]
    causal: Tensor | None


def plan_lists(axis: RowAxis, chunks: tuple[ScoreChunk, ...], width: int) -> ListPlan:
    """What every layer's lists on ``axis`` share; ``width``: of the lists."""
    grouped: list[list[ScoreChunk]] = []
    for chunk in chunks:
        if chunk.key_start == 0:
            grouped.append([])
        grouped[-1].append(chunk)
    runs = tuple(_run(axis, group) for group in grouped)
    is_whole = len(runs) == 1 and runs[0].rows is None
    if is_whole:
        return ListPlan(axis.kv_len.clamp_max(width), runs, None)
    causal = causal_list(axis, "keys", width)
    return ListPlan(causal.count, runs, causal.ids)


def _run(axis: RowAxis, chunks: list[ScoreChunk]) -> ScoreRun:
    rows = _rows_of(chunks[0], axis)
    request, kv_len = (t if rows is None else t[rows] for t in (axis.request, axis.kv_len))
    counts = [
        (kv_len - c.key_start if c.key_start else kv_len).clamp(0, c.key_stop - c.key_start)
        for c in chunks
    ]
    return ScoreRun(rows, request.clamp_min(0), tuple(chunks), tuple(counts))


def _rows_of(chunk: ScoreChunk, axis: RowAxis) -> slice | Tensor | None:
    if isinstance(chunk, PagedScoreChunk):
        if len(chunk.rows) == axis.num_rows:
            return None
        if chunk.rows[-1] - chunk.rows[0] + 1 == len(chunk.rows):  # ascending, without a gap
            return slice(chunk.rows[0], chunk.rows[-1] + 1)
        rows = torch.tensor(chunk.rows, dtype=torch.int64)
        return rows.to(axis.device, non_blocking=True)
    is_whole = chunk.num_rows == axis.num_rows
    return None if is_whole else slice(chunk.row_start, chunk.row_stop)
