"""Exact top-k of the triton provider, with the transform to slots fused.

In:  scores [M, N] fp32, count [M], k. Out: TopK: ids ascending, −1 behind, ties to lower columns.
`topk` reads every column below count (NaN raises the row's flag); `topk_slots` reads nothing of
rows that see at most k columns, nothing behind a count, and adds the slots of the ids.
One launch. What a row gets does not depend on the other rows: the result is exact.
Compiled forms: one for each Search and choice of outputs; `forms` names a shape for each.
Not here: the algorithm (topk_tiles.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.ops.values import RowPages, TopK
from gnomon.attention.providers.triton.index_views import num_processors, side_by_side
from gnomon.attention.providers.triton.language import padded
from gnomon.attention.providers.triton.topk_tiles import topk_kernel
from gnomon.errors import UnsupportedError

WORD = 32
MOST = 4096  # k; candidates of a row are kept in registers
SHORT = 8192  # columns of a row that is held whole
LONG = 131_072  # columns: beyond, more candidates are wished for, as the sample is thinner


@dataclass(frozen=True, slots=True)
class Search:
    """``cap``: candidates kept; ``sample``: columns looked at first; ``block``: columns a step.

    Powers of two; k < cap <= 16,384, sample <= cap. ``programs`` a multiprocessor; ``registers`` a
    thread; ``chunk``: words counted or columns gathered at once; ``stages``: blocks on their way.
    """

    cap: int
    sample: int
    block: int
    warps: int
    programs: int
    registers: int | None = None
    chunk: int = 1024
    stages: int = 1

    def target(self, k: int, num_columns: int) -> float:
        """How many columns a guess should let pass, between k and ``cap``."""
        few = min(self.cap, padded(2 * k, 1024))
        return math.sqrt(k * (few if num_columns <= LONG else self.cap))


def search_for(k: int, num_rows: int, num_columns: int, processors: int) -> Search:
    """Sizes for a shape: few rows get large blocks, many rows several programs at once."""
    cap = padded(2 * k, 1024)
    if num_rows <= 2 * processors:
        sample = 4096 if num_columns <= LONG else SHORT
        return Search(max(cap, SHORT), sample, SHORT, 16, 1, chunk=2048, stages=4)
    if num_columns <= SHORT:
        return Search(max(cap, SHORT), 4096, 4096, 16, 2, 64, 2048)
    return Search(cap, min(cap, 4096), 4096, 8, 4, 64)


def forms(k: int, most_rows: int, most_columns: int, processors: int) -> list[tuple[int, int]]:
    """(rows, columns) of a call for every Search that calls of at most so many can meet."""
    rows = (1, 2 * processors, 2 * processors + 1, most_rows)
    columns = (k, SHORT, SHORT + 1, LONG, LONG + 1, most_columns)
    found: dict[Search, tuple[int, int]] = {}
    for num_rows in sorted({n for n in rows if n <= most_rows}):
        for num_columns in sorted({n for n in columns if n <= max(k, most_columns)}):
            search = search_for(k, num_rows, num_columns, processors)
            found.setdefault(search, (num_rows, num_columns))
    return list(found.values())


def topk(scores: Tensor, count: Tensor, k: int, want_margin: bool = False) -> TopK:
    """The exact k best of the first count[m] columns of every row."""
    num_rows, device = scores.shape[0], scores.device
    out = _empty(num_rows, k, want_margin, device)
    if num_rows:
        _launch(scores, count, k, out, None)
    return out


def topk_slots(
    scores: Tensor | None,
    count: Tensor,
    k: int,
    want_margin: bool,
    rows: RowPages,
    out: TopK | None = None,
) -> TopK:
    """The same with slots; ``scores`` None: no row sees more than k columns.

    ``out``: where to write (every row of it is written), else it is allocated.
    """
    num_rows, device = count.shape[0], count.device
    _require_size(k)
    if out is None:
        slots = torch.empty((num_rows, k), dtype=torch.int64, device=device)
        plain = _empty(num_rows, k, want_margin, device)
        out = TopK(plain.ids, plain.count, plain.margin, plain.nan_rows, slots)
    if num_rows:
        _launch(scores, count, k, out, rows)
    return out


def _empty(num_rows: int, k: int, want_margin: bool, device: torch.device) -> TopK:
    _require_size(k)
    return TopK(
        torch.empty((num_rows, k), dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device) if want_margin else None,
        torch.empty(num_rows, dtype=torch.bool, device=device),
    )


def _launch(
    scores: Tensor | None,
    count: Tensor,
    k: int,
    out: TopK,
    rows: RowPages | None,
    search: Search | None = None,
) -> None:
    num_rows, device = out.ids.shape[0], count.device
    num_columns = k if scores is None else scores.shape[1]
    sizes = search or search_for(k, num_rows, num_columns, num_processors(device))
    programs = min(num_rows, num_processors(device) * sizes.programs)
    num_words = -(-max(num_columns, sizes.cap) // WORD)
    scratch = torch.empty(
        (programs, 2 * sizes.cap + 3 * num_words), dtype=torch.int32, device=device
    )
    scores = scratch.view(torch.float32) if scores is None else side_by_side(scores)
    topk_kernel[(programs,)](
        scores,
        count,
        out.ids,
        out.slots,
        out.count,
        out.margin,
        out.nan_rows,
        None if rows is None else rows.pages,
        None if rows is None else rows.request,
        scratch,
        num_rows,
        num_columns,
        0 if rows is None else rows.pages.shape[1],
        scores.stride(0),
        out.ids.stride(0),
        0 if out.slots is None else out.slots.stride(0),
        0 if rows is None else rows.pages.stride(0),
        scratch.stride(0),
        padded(num_words) // 2,
        sizes.target(k, num_columns),
        K=k,
        CAP=sizes.cap,
        SAMPLE=sizes.sample,
        BLOCK=sizes.block,
        CHUNK=sizes.chunk,
        LIST=min(padded(k), sizes.chunk),
        STAGES=sizes.stages,
        PAGE=1 if rows is None else rows.page_size,
        LOOKS=rows is None,
        num_warps=sizes.warps,
        maxnreg=sizes.registers,
    )


def _require_size(k: int) -> None:
    if not 1 <= k <= MOST:
        raise UnsupportedError(
            f"the triton top-k keeps 1 to {MOST} ids a row; got k = {k}. Use another provider"
        )


KERNELS: dict[str, Callable[..., Any]] = {"topk": topk}
FUSIONS: dict[str, Callable[..., Any]] = {"topk_slots": topk_slots}
