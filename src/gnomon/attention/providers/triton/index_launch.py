"""Launches of the index-score kernels: grids, tiles, strides.

In:  rows (queries [M, H, D], head weights [M, H], counts [M], a scale) and keys: numbers [N, D],
     codes with scales, or a pool with pages. Out: fp32 scores, their rows 128 bytes aligned.
``fills``: −inf in a row from its count on, else these columns stay unwritten.
Not here: which keys are taken as codes, which tile (index.py); kernels (index_tiles.py,
index_codes.py).
"""

from __future__ import annotations

import triton
from torch import Tensor

from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.triton.index_codes import code_scores_kernel
from gnomon.attention.providers.triton.index_tiles import (
    hide_tails_kernel,
    paged_scores_kernel,
    scores_kernel,
)
from gnomon.attention.providers.triton.index_views import (
    CODE,
    FEWEST_COLUMNS,
    FEWEST_HEADS,
    PAGED_TILES,
    Tile,
    cast_of,
    encoded,
    num_processors,
    parts_of,
    score_rows,
    side_by_side,
    view_of,
)
from gnomon.attention.providers.triton.language import has_native_fp8, padded

WAVES = 48  # programs per multiprocessor that contiguous scores are split into, keys allowing
LONG_PART, SHORT_PART = 32, 8  # blocks of keys a program should have; so few to fill the machine
TAIL_BLOCK = 1024  # columns that are hidden at once
RESIDENT = 4  # programs that a multiprocessor holds at once
Scored = tuple[Tensor, Tensor, Tensor, float]  # q, weights, count, scale


def plain_scores(scored: Scored, keys: Tensor, tile: Tile, fills: bool) -> Tensor:
    """Scores [M, N] of keys [N, D], in the queries' dtype."""
    q, weights, count, scale = scored
    q, weights, keys = (side_by_side(x) for x in (q, weights, keys.to(q.dtype)))
    (num_rows, num_heads, dim), num_keys = q.shape, keys.shape[0]
    out = score_rows(num_rows, num_keys, count.device)
    if out.numel() == 0:
        return out
    heads = padded(num_heads, FEWEST_HEADS)
    scores_kernel[_grid(out, heads, tile)](
        q,
        weights,
        keys,
        count,
        out,
        scale,
        num_rows,
        num_keys,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        keys.stride(0),
        out.stride(0),
        H=num_heads,
        HEADS=heads,
        D=dim,
        DIM=padded(dim, FEWEST_COLUMNS),
        ROWS=tile.rows(heads),
        BLOCK=tile.keys,
        num_stages=tile.stages,
        num_warps=tile.warps,
        maxnreg=tile.most_registers(out.device),
    )
    return hidden(out, count) if fills else out


def code_scores(
    scored: Scored, keys: tuple[Tensor, Tensor], num_keys: int, tile: Tile, fills: bool
) -> Tensor:
    """Scores [M, num_keys] of keys' (codes, scales), padded to tiles; FP8 by FP8."""
    q, weights, count, scale = scored
    (num_rows, num_heads, _), heads = q.shape, padded(q.shape[1], FEWEST_HEADS)
    out = score_rows(num_rows, num_keys, count.device)
    if out.numel() == 0:
        return out
    codes, scales = encoded(q, heads, tile.rows(heads))
    weights = side_by_side(weights)
    code_scores_kernel[_grid(out, heads, tile)](
        codes.view(CODE),
        weights,
        scales,
        keys[0].view(CODE),
        keys[1],
        count,
        out,
        scale,
        num_rows,
        num_keys,
        weights.stride(0),
        out.stride(0),
        H=num_heads,
        HEADS=heads,
        DIM=codes.shape[-1],
        ROWS=tile.rows(heads),
        BLOCK=tile.keys,
        num_stages=tile.stages,
        num_warps=tile.warps,
        maxnreg=tile.most_registers(out.device),
    )
    return hidden(out, count) if fills else out


def hidden(scores: Tensor, count: Tensor) -> Tensor:
    """−inf in the columns of scores [M, N] from count[m] on, in place."""
    num_rows, num_columns = scores.shape
    row = scores.stride(0)
    hide_tails_kernel[(num_rows,)](count, scores, num_columns, row, BLOCK=TAIL_BLOCK)
    return scores


def _grid(out: Tensor, heads: int, tile: Tile) -> tuple[int, int]:
    """Programs of contiguous scores: groups of rows by parts of the keys."""
    groups = triton.cdiv(out.shape[0], tile.rows(heads))
    blocks = triton.cdiv(out.shape[1], tile.keys)
    processors = num_processors(out.device)
    filling = min(triton.cdiv(RESIDENT * processors, groups), triton.cdiv(blocks, SHORT_PART))
    most = triton.cdiv(WAVES * processors, groups)
    return groups, min(most, max(filling, triton.cdiv(blocks, LONG_PART)))


def paged_scores(
    scored: Scored, pool: PagedPool, rows: RowPages, limits: tuple[int, int], fills: bool
) -> Tensor:
    """Scores [M, width], ``limits`` = (width, least), of rows that see more than ``least`` keys."""
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
        maxnreg=tile.most_registers(out.device),
    )
    return out
