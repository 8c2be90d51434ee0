"""Index scores of the triton provider: contiguous and paged, of plain keys and of FP8 codes.

In:  index queries [M, H, D], head weights [M, H], keys [N, D] or a pool with pages, counts [M].
Out: fp32 scores [M, N], −inf from count[m] on; the `lazy_` forms leave those unwritten.
Under an `index_k` layout queries are codes times a power of two (KVLayout.rounds_queries): the
`_codes` kernels take the codes of queries and keys back exactly and multiply FP8 by FP8.
Fixed bits: a score depends on its row, its key and the tile, never on other rows, chunks or pages;
the `_fixed` kernels use tiles of one row for contiguous and paged keys alike.
Not here: the kernels themselves (index_tiles.py), which form is bound (__init__.py, dispatch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from gnomon.attention.dispatch import OpNeed
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.triton.cache_gather import context_gather
from gnomon.attention.providers.triton.index_tiles import paged_scores_kernel, scores_kernel
from gnomon.attention.providers.triton.index_views import (
    CODE,
    FEWEST_COLUMNS,
    FEWEST_HEADS,
    KEY_BLOCK,
    PAGED_TILES,
    TILES,
    Tile,
    cast_of,
    encoded,
    gathered_codes,
    multiplies_codes,
    num_processors,
    parts_of,
    score_rows,
    side_by_side,
    view_of,
)
from gnomon.attention.providers.triton.language import has_native_fp8, padded

Kernel = Callable[..., Any]
WAVES = 24  # programs per multiprocessor that contiguous scores are split into, keys allowing
RESIDENT = 4  # programs of paged scores that a multiprocessor holds at once
Scored = tuple[Tensor, Tensor, Tensor, float]  # q, weights, count, scale


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float) -> Tensor:
    """scores[m, n] = scale · Σ_h weights[m, h] · relu(q[m, h] · keys[n]); −inf from count[m] on."""
    return _plain_scores((q, weights, count, scale), keys, TILES[q.dtype], fills=True)


def index_scores_fixed(
    q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same with the bits of index_scores_paged."""
    return _plain_scores((q, weights, count, scale), keys, PAGED_TILES[q.dtype], fills=True)


def index_scores_codes(
    q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same for queries and keys that are e4m3 codes times a power of two, FP8 by FP8."""
    return _codes_of_both((q, weights, count, scale), keys, is_fixed=False)


def index_scores_codes_fixed(
    q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same with the bits of index_scores_paged."""
    return _codes_of_both((q, weights, count, scale), keys, is_fixed=True)


def index_scores_paged(
    q: Tensor, weights: Tensor, pool: PagedPool, pages: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same for rows that each have their own pages [M, P]: [M, P * page_size]."""
    rows, width = RowPages(pages, None, pool.page_size), pages.shape[1] * pool.page_size
    return _paged_scores((q, weights, count, scale), pool, rows, (width, -1), fills=True)


def lazy_scores_paged(
    q: Tensor,
    weights: Tensor,
    pool: PagedPool,
    rows: RowPages,
    count: Tensor,
    scale: float,
    limits: tuple[int, int],
) -> Tensor:
    """[M, width] with ``limits`` = (width, least); defined below count[m] where that > least."""
    return _paged_scores((q, weights, count, scale), pool, rows, limits, fills=False)


def lazy_scores(
    q: Tensor,
    weights: Tensor,
    pool: PagedPool,
    pages: Tensor,
    num_keys: int,
    count: Tensor,
    scale: float,
) -> Tensor:
    """[M, num_keys] against entries 0 .. num_keys − 1 of ``pages`` [P]; defined below count[m]."""
    return _pool_scores((q, weights, count, scale), pool, pages, num_keys, False)


def lazy_scores_fixed(
    q: Tensor,
    weights: Tensor,
    pool: PagedPool,
    pages: Tensor,
    num_keys: int,
    count: Tensor,
    scale: float,
) -> Tensor:
    """The same with the bits of index_scores_paged."""
    return _pool_scores((q, weights, count, scale), pool, pages, num_keys, True)


def _pool_scores(
    scored: Scored, pool: PagedPool, pages: Tensor, num_keys: int, is_fixed: bool
) -> Tensor:
    if view_of(pool).kind != "codes":
        tile = (PAGED_TILES if is_fixed else TILES)[scored[0].dtype]
        keys = context_gather(pool, pages, 0, num_keys)
        return _plain_scores(scored, keys, tile, fills=False)
    codes = gathered_codes(pool, pages, num_keys, KEY_BLOCK)
    tile = (PAGED_TILES if is_fixed else TILES)[CODE]
    return _code_scores(scored, codes, num_keys, tile, fills=False)


def _codes_of_both(scored: Scored, keys: Tensor, is_fixed: bool) -> Tensor:
    q = scored[0]
    if not multiplies_codes(q.device):
        tile = (PAGED_TILES if is_fixed else TILES)[q.dtype]
        return _plain_scores(scored, keys, tile, fills=True)
    codes, scales = encoded(keys[:, None], 1, KEY_BLOCK)
    tile = (PAGED_TILES if is_fixed else TILES)[CODE]
    return _code_scores(scored, (codes[:, 0], scales), keys.shape[0], tile, fills=True)


def _plain_scores(scored: Scored, keys: Tensor, tile: Tile, fills: bool) -> Tensor:
    q, weights, count, scale = scored
    rows = side_by_side(q), side_by_side(weights), None
    keys = side_by_side(keys.to(q.dtype))
    return _launch((rows, count, scale), (keys, None), (keys.shape[0], q.shape[1:]), tile, fills)


def _code_scores(
    scored: Scored, keys: tuple[Tensor, Tensor], num_keys: int, tile: Tile, fills: bool
) -> Tensor:
    q, weights, count, scale = scored
    heads = padded(q.shape[1], FEWEST_HEADS)
    codes, scales = encoded(q, heads, tile.rows(heads))
    rows = codes.view(CODE), side_by_side(weights), scales
    keys = keys[0].view(CODE), keys[1]
    return _launch((rows, count, scale), keys, (num_keys, q.shape[1:]), tile, fills)


Rows = tuple[Tensor, Tensor, Tensor | None]  # queries, head weights, scales of the queries


def _launch(
    asked: tuple[Rows, Tensor, float],
    keys: tuple[Tensor, Tensor | None],
    shape: tuple[int, torch.Size],
    tile: Tile,
    fills: bool,
) -> Tensor:
    """Scores of ``asked`` (rows, count, scale); shape: number of keys, (H, D) of the queries."""
    (q, weights, q_scales), count, scale = asked
    num_keys, (num_heads, dim) = shape
    num_rows, heads = weights.shape[0], padded(num_heads, FEWEST_HEADS)
    out = score_rows(num_rows, num_keys, count.device)
    if out.numel() == 0:
        return out
    rows = tile.rows(heads)
    groups, blocks = triton.cdiv(num_rows, rows), triton.cdiv(num_keys, tile.keys)
    parts = min(triton.cdiv(WAVES * num_processors(count.device), groups), triton.cdiv(blocks, 8))
    scores_kernel[(groups, parts)](
        q,
        weights,
        q_scales,
        keys[0],
        keys[1],
        count,
        out,
        scale,
        num_rows,
        num_keys,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        keys[0].stride(0),
        out.stride(0),
        H=num_heads,
        HEADS=heads,
        D=dim,
        DIM=padded(dim, FEWEST_COLUMNS),
        ROWS=rows,
        BLOCK=tile.keys,
        IS_CODES=q_scales is not None,
        FILLS=fills,
        STAGES=tile.stages,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
    return out


def _paged_scores(
    scored: Scored, pool: PagedPool, rows: RowPages, limits: tuple[int, int], fills: bool
) -> Tensor:
    q, weights, count, scale = scored
    (num_rows, num_heads, dim), (width, least) = q.shape, limits
    view, weights = view_of(pool), side_by_side(weights)
    q = side_by_side(q if q.dtype == pool.layout.computed_dtype else q.float())
    tile = PAGED_TILES[CODE if view.kind == "codes" else q.dtype]
    out = score_rows(num_rows, width, count.device)
    if out.numel() == 0:
        return out
    resident = RESIDENT * num_processors(count.device)
    parts = min(parts_of(num_rows, resident), triton.cdiv(width, tile.keys))
    paged_scores_kernel[(parts, num_rows)](
        q,
        weights,
        view.keys,
        view.scales,
        rows.pages,
        rows.request,
        count,
        out,
        scale,
        width,
        least,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        rows.pages.stride(0),
        view.keys.stride(0),
        0 if view.scales is None else view.scales.stride(0),
        out.stride(0),
        H=num_heads,
        HEADS=padded(num_heads, FEWEST_HEADS),
        D=dim,
        DIM=padded(dim, FEWEST_COLUMNS),
        PAGE=pool.page_size,
        BLOCK=tile.keys,
        KEYS=view.kind,
        CAST=cast_of(pool, q.dtype),
        NATIVE=has_native_fp8(count.device),
        FILLS=fills,
        STAGES=tile.stages,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
    return out


def _for_codes(usual: Kernel, fixed: Kernel) -> Callable[[OpNeed], Kernel | None]:
    """The kernel to take where the index layout rounds queries; None elsewhere."""

    def choose(need: OpNeed) -> Kernel | None:
        if need.index_layout is None or not need.index_layout.startswith("index_k_"):
            return None
        return fixed if need.is_deterministic else usual

    return choose


KERNELS: dict[str, Kernel] = {
    "index_scores": index_scores,
    "index_scores_paged": index_scores_paged,
}
FIXED: dict[str, Kernel] = {"index_scores": index_scores_fixed}
VARIANTS: dict[str, Callable[[OpNeed], Kernel | None]] = {
    "index_scores": _for_codes(index_scores_codes, index_scores_codes_fixed)
}
FUSIONS: dict[str, Kernel] = {
    "lazy_scores": lazy_scores,
    "lazy_scores_paged": lazy_scores_paged,
}
FIXED_FUSIONS: dict[str, Kernel] = {"lazy_scores": lazy_scores_fixed}
