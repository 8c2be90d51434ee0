"""Exact top-k of the triton provider, with the transform to slots fused.

In:  scores [M, N] fp32, count [M], k. Out: TopK: ids ascending, −1 behind, ties to lower columns.
`topk` reads every column below count (NaN raises the row's flag); `topk_slots` reads nothing of
rows that see at most k columns, nothing behind a count, and adds the slots of the ids.
One launch; few long rows take two, so that many programs share a row.
What a row gets does not depend on the other rows, nor on the form: the result is exact.
Compiled forms: one for each Search or Split and choice of outputs; `forms` names a shape for each.
Not here: the algorithms (topk_tiles.py, topk_parts.py, topk_settle.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.ops.values import RowPages, TopK
from gnomon.attention.providers.triton.attention_tiles import can_launch_early
from gnomon.attention.providers.triton.index_views import num_processors, side_by_side
from gnomon.attention.providers.triton.language import padded
from gnomon.attention.providers.triton.topk_parts import topk_parts_kernel
from gnomon.attention.providers.triton.topk_settle import topk_settle_kernel
from gnomon.attention.providers.triton.topk_tiles import topk_kernel
from gnomon.errors import UnsupportedError

WORD = 32
MOST = 4096  # k; candidates of a row are kept in registers
SHORT = 8192  # columns of a row that is held whole
LONG = 131_072  # columns: beyond, more candidates are wished for, as the sample is thinner
FEW = 32  # rows of which each is shared by several programs
PARTS = 128  # programs that share a row at most
PLANES = 8  # numbers a part leaves


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


@dataclass(frozen=True, slots=True)
class Split:
    """Sizes of a row shared by several programs: ``cap``, ``sample`` as of a Search.

    ``part``: columns a step of a program that sifts a part of a row, of ``part_warps``; ``block``:
    columns a step of the program that settles it, of ``warps`` with ``registers`` a thread;
    ``chunk``: words counted and ids written at once. ``programs``: a multiprocessor, of parts, at
    most. ``is_early``: the second kernel is launched before the first has ended.
    """

    cap: int
    sample: int
    part: int
    part_warps: int
    block: int
    warps: int
    programs: int = 2
    chunk: int = 2048
    is_early: bool = True
    registers: int | None = None

    def target(self, k: int) -> float:
        """How many columns a guess should let pass, between k and ``cap``."""
        return math.sqrt(k * min(self.cap, padded(4 * k, 1024)))

    def parts(self, num_rows: int, num_columns: int, processors: int) -> int:
        """Programs a row."""
        most = min(PARTS, max(1, self.programs * processors // num_rows))
        blocks = -(-num_columns // self.part)
        return -(-blocks // -(-blocks // most))


def search_for(k: int, num_rows: int, num_columns: int, processors: int) -> Search | Split:
    """Sizes for a shape: few rows are shared, some get large blocks, many several at once."""
    cap = padded(2 * k, 1024)
    if num_rows <= FEW or (num_rows <= 2 * processors and num_columns <= max(cap, SHORT)):
        return Split(max(cap, SHORT), 2048, 2048, 8, SHORT, 16)
    if num_rows <= 2 * processors:
        sample = 4096 if num_columns <= LONG else SHORT
        return Search(max(cap, SHORT), sample, SHORT, 16, 1, chunk=2048, stages=4)
    if num_columns <= SHORT:
        return Search(max(cap, SHORT), 4096, 4096, 16, 2, 64, 2048)
    return Search(cap, min(cap, 4096), 4096, 8, 4, 64)


def forms(k: int, most_rows: int, most_columns: int, processors: int) -> list[tuple[int, int]]:
    """(rows, columns) of a call for every Search that calls of at most so many can meet."""
    rows = (1, FEW, FEW + 1, 2 * processors, 2 * processors + 1, most_rows)
    columns = (k, SHORT, SHORT + 1, LONG, LONG + 1, most_columns)
    found: dict[Search | Split, tuple[int, int]] = {}
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
    search: Search | Split | None = None,
) -> None:
    num_rows, device = out.ids.shape[0], count.device
    num_columns = k if scores is None else scores.shape[1]
    sizes = search or search_for(k, num_rows, num_columns, num_processors(device))
    if isinstance(sizes, Split):
        _launch_shared(scores, count, k, out, rows, sizes)
        return
    programs = min(num_rows, num_processors(device) * sizes.programs)
    num_words = -(-max(num_columns, sizes.cap) // WORD)
    scratch = torch.empty(
        (programs, 2 * sizes.cap + 3 * num_words), dtype=torch.int32, device=device
    )
    scores = scratch.view(torch.float32) if scores is None else side_by_side(scores)
    topk_kernel[(programs,)](
        scores,
        count,
        *_pointers(out, rows),
        scratch,
        num_rows,
        num_columns,
        0 if rows is None else rows.pages.shape[1],
        *_strides(scores, out, rows),
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


def _launch_shared(
    scores: Tensor | None, count: Tensor, k: int, out: TopK, rows: RowPages | None, sizes: Split
) -> None:
    """Parts are sifted only where rows may be longer than what is held whole."""
    num_rows, device = out.ids.shape[0], count.device
    num_columns = k if scores is None else scores.shape[1]
    parts = sizes.parts(num_rows, num_columns, num_processors(device))
    is_wide = scores is not None and num_columns > sizes.cap
    share = -(-num_columns // (sizes.part * parts)) * sizes.part
    region = min(share, sizes.cap) if is_wide else 0
    num_words = -(-max(num_columns, sizes.cap) // (4 * WORD)) * 4
    width = PLANES * PARTS + 4 * num_words + sizes.cap + 2 * parts * region
    scratch = torch.empty((num_rows, width), dtype=torch.int32, device=device)
    is_early = sizes.is_early and can_launch_early(device)
    scores = scratch.view(torch.float32) if scores is None else side_by_side(scores)
    if is_wide:
        top = padded(-(-share // WORD)) // 2
        placed = (num_columns, scores.stride(0), width, num_words, region, top)
        grid, target = (parts, num_rows), sizes.target(k)
        _sift(grid, (scores, count, scratch), placed, target, sizes, is_early)
    topk_settle_kernel[(num_rows,)](
        scores,
        count,
        *_pointers(out, rows),
        scratch,
        num_columns,
        0 if rows is None else rows.pages.shape[1],
        *_strides(scores, out, rows),
        parts,
        width,
        num_words,
        region,
        padded(-(-max(num_columns, sizes.cap) // WORD)) // 2,
        K=k,
        CAP=sizes.cap,
        BLOCK=sizes.block,
        PART_BLOCK=sizes.part,
        CHUNK=sizes.chunk,
        LIST=min(padded(k), sizes.chunk),
        PARTS=PARTS,
        PAGE=1 if rows is None else rows.page_size,
        LOOKS=rows is None,
        IS_EARLY=is_early,
        num_warps=sizes.warps,
        maxnreg=sizes.registers,
        **({"launch_pdl": True} if is_early else {}),
    )


def _sift(
    grid: tuple[int, int],
    pointers: tuple[Tensor, Tensor, Tensor],
    placed: tuple[int, ...],
    target: float,
    sizes: Split,
    is_early: bool,
) -> None:
    topk_parts_kernel[grid](
        *pointers,
        *placed,
        target,
        CAP=sizes.cap,
        SAMPLE=sizes.sample,
        BLOCK=sizes.part,
        PARTS=PARTS,
        CHUNK=min(sizes.chunk, 32 * sizes.part_warps),
        IS_EARLY=is_early,
        num_warps=sizes.part_warps,
    )


def _pointers(out: TopK, rows: RowPages | None) -> tuple[Tensor | None, ...]:
    pages, request = (None, None) if rows is None else (rows.pages, rows.request)
    return (out.ids, out.slots, out.count, out.margin, out.nan_rows, pages, request)


def _strides(scores: Tensor, out: TopK, rows: RowPages | None) -> tuple[int, int, int, int]:
    """Of rows of scores, ids, slots and pages."""
    slots = 0 if out.slots is None else out.slots.stride(0)
    return scores.stride(0), out.ids.stride(0), slots, 0 if rows is None else rows.pages.stride(0)


def _require_size(k: int) -> None:
    if not 1 <= k <= MOST:
        raise UnsupportedError(
            f"the triton top-k keeps 1 to {MOST} ids a row; got k = {k}. Use another provider"
        )


KERNELS: dict[str, Callable[..., Any]] = {"topk": topk}
FUSIONS: dict[str, Callable[..., Any]] = {"topk_slots": topk_slots}
