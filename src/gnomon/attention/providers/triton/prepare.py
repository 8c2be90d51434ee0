"""Everything that attention needs before it scores keys, in one launch.

In:  raw latents and index keys with the slots they go to, raw index queries, the rope part of the
     attention queries (any strides but the last). Out: bytes of both pools, both kinds of queries,
     turned. The same device code as latent_write, index_prepare and rope: the same bits.
Programs: first some latents each, then some index keys each, then some heads of a row's index
     queries, then some heads of a row's attention queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.layouts import PagedPool
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.providers.triton.cache import (
    TILE,
    IndexShape,
    LatentShape,
    RowsTile,
    with_neighbours,
)
from gnomon.attention.providers.triton.cache_device import (
    turn_index_queries,
    write_index_keys,
    write_latents,
)
from gnomon.attention.providers.triton.language import UNFUSED, padded, round_to
from gnomon.attention.providers.triton.layout_rows import PoolView
from gnomon.attention.providers.triton.rows import heads_of
from gnomon.attention.providers.triton.rows_device import rotated_heads

LatentWrite = tuple[Tensor, Tensor, float, RopeRows, PagedPool, Tensor]
IndexPrepare = tuple[Tensor, Tensor, IndexTransform, tuple[RopeRows, RopeRows], PagedPool, Tensor]


@triton.jit
def turn_queries(
    part,
    x,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    out_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Rotate HEADS_BLOCK heads [.., DIM] of one row; ``part`` counts them over all rows."""
    PARTS: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    row = (part // PARTS).to(tl.int64)
    first = (part % PARTS) * HEADS_BLOCK
    turned = rotated_heads(
        x + row * row_stride,
        cos + row * DIM,
        sin + row * DIM,
        head_stride,
        first,
        HEADS,
        DIM,
        DIM,
        HEADS_BLOCK,
        BLOCK,
        IS_INTERLEAVED,
    )
    head = first + tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < DIM)
    place = out + row * out_stride + head * out_head_stride + column
    tl.store(place, round_to(turned, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_latents", "latent_programs"])
def write_latent_and_rope_kernel(
    x,
    x_cos,
    x_sin,
    x_out,
    kv,
    weight,
    cos,
    sin,
    slots,
    pool,
    num_latents,
    latent_programs,
    row_stride,
    head_stride,
    out_stride,
    out_head_stride,
    kv_stride,
    pool_stride,
    eps,
    X_HEADS: tl.constexpr,
    X_DIM: tl.constexpr,
    X_HEADS_BLOCK: tl.constexpr,
    X_BLOCK: tl.constexpr,
    IS_X_INTERLEAVED: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Latents, then attention queries."""
    program = tl.program_id(0)
    if program < latent_programs:
        write_latents(
            program * ROWS_BLOCK, num_latents, kv, weight, cos, sin, slots, pool,
            kv_stride, pool_stride, eps, ROWS_BLOCK, RANK, ROPE, GROUP, GROUPS_BLOCK,
            GROUP_BLOCK, ROPE_BLOCK, IS_INTERLEAVED, PAGE, WIDTH, IS_PACKED, NATIVE,
        )  # fmt: skip
    else:
        turn_queries(
            program - latent_programs, x, x_cos, x_sin, x_out, row_stride, head_stride,
            out_stride, out_head_stride, X_HEADS, X_DIM, X_HEADS_BLOCK, X_BLOCK, IS_X_INTERLEAVED,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_latents", "num_keys", "latent_programs", "key_programs", "query_programs"
    ]
)  # fmt: skip
def prepare_attention_kernel(
    x, x_cos, x_sin, x_out,
    kv, weight, cos, sin, slots, pool,
    q, k, k_weight, k_bias, q_cos, q_sin, k_cos, k_sin, k_slots, k_pool, q_out,
    num_latents, num_keys, latent_programs, key_programs, query_programs,
    row_stride, head_stride, out_stride, out_head_stride, kv_stride, pool_stride,
    q_stride, q_head_stride, k_stride, k_pool_stride,
    eps, k_eps,
    X_HEADS: tl.constexpr, X_DIM: tl.constexpr, X_HEADS_BLOCK: tl.constexpr,
    X_BLOCK: tl.constexpr, IS_X_INTERLEAVED: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, IS_PACKED: tl.constexpr, NATIVE: tl.constexpr,
    HEADS: tl.constexpr, DI: tl.constexpr, DIM: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, HAS_HADAMARD: tl.constexpr,
    SCALE: tl.constexpr, IS_Q_INTERLEAVED: tl.constexpr, IS_K_INTERLEAVED: tl.constexpr,
    K_PAGE: tl.constexpr, IS_K_PACKED: tl.constexpr, IS_K_NATIVE: tl.constexpr,
):  # fmt: skip
    """Latents, index keys, index queries, attention queries."""
    program = tl.program_id(0)
    if program < latent_programs:
        write_latents(
            program * ROWS_BLOCK, num_latents, kv, weight, cos, sin, slots, pool,
            kv_stride, pool_stride, eps, ROWS_BLOCK, RANK, ROPE, GROUP, GROUPS_BLOCK,
            GROUP_BLOCK, ROPE_BLOCK, IS_INTERLEAVED, PAGE, WIDTH, IS_PACKED, NATIVE,
        )  # fmt: skip
    elif program < latent_programs + key_programs:
        write_index_keys(
            (program - latent_programs) * KEYS_BLOCK, num_keys, k, k_weight, k_bias, k_cos, k_sin,
            k_slots, k_pool, k_stride, k_pool_stride, k_eps, KEYS_BLOCK, DI, DIM, BLOCK,
            HAS_HADAMARD, SCALE, IS_K_INTERLEAVED, K_PAGE, IS_K_PACKED, IS_K_NATIVE,
        )  # fmt: skip
    elif program < latent_programs + key_programs + query_programs:
        PARTS: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
        part = program - latent_programs - key_programs
        turn_index_queries(
            (part // PARTS).to(tl.int64), (part % PARTS) * HEADS_BLOCK, q, q_cos, q_sin, q_out,
            q_stride, q_head_stride, HEADS, DI, DIM, HEADS_BLOCK, BLOCK, HAS_HADAMARD, SCALE,
            IS_Q_INTERLEAVED, IS_K_PACKED, IS_K_NATIVE,
        )  # fmt: skip
    else:
        turn_queries(
            program - latent_programs - key_programs - query_programs, x, x_cos, x_sin, x_out,
            row_stride, head_stride, out_stride, out_head_stride,
            X_HEADS, X_DIM, X_HEADS_BLOCK, X_BLOCK, IS_X_INTERLEAVED,
        )  # fmt: skip


def write_latent_and_rope(
    q_rope: Tensor,
    rope: RopeRows,
    latent: LatentWrite,
    tile: RowsTile = TILE,
    out: Tensor | None = None,
) -> Tensor:
    """latent_write(*latent) and rope(q_rope, rope) of q_rope [R, H, D_r]; returns the latter.

    ``out``: where the latter goes, of any strides but the last.
    """
    if out is None:
        out = torch.empty_like(q_rope, memory_format=torch.contiguous_format)
    turn, shape, parts = _turn(q_rope, rope, out, tile)
    write, latent_shape, (num_latents, latent_programs) = _write(latent, tile)
    programs = latent_programs + parts
    if programs:
        write_latent_and_rope_kernel[(programs,)](
            *turn[:4], *write[:6], num_latents, latent_programs, *turn[4:], *write[6:],
            *shape, *latent_shape.constants(), num_warps=tile.num_warps, **UNFUSED,
        )  # fmt: skip
    return out


def prepare_attention(
    q_rope: Tensor,
    rope: RopeRows,
    latent: LatentWrite,
    index: IndexPrepare,
    tile: RowsTile = TILE,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """latent_write(*latent), index_prepare(*index) and rope(q_rope, rope).

    Returns (q_rope [R, H, D_r] turned, index queries turned). ``out``: where the former goes, of
    any strides but the last.
    """
    q, k, transform, rows, pool, slots = index
    if out is None:
        out = torch.empty_like(q_rope, memory_format=torch.contiguous_format)
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    turn, shape, parts = _turn(q_rope, rope, out, tile)
    write, latent_shape, (num_latents, latent_programs) = _write(latent, tile)
    heads, k, view = heads_of(q) if q.numel() else q, with_neighbours(k), PoolView.of(pool)
    interleaved = (rows[0].is_interleaved, rows[1].is_interleaved)
    index_shape = IndexShape(
        tile, q.shape[1], q.shape[2], rows[0].dim, transform.has_hadamard, view, interleaved
    )
    key_programs = triton.cdiv(k.shape[0], index_shape.keys_block)
    query_programs = q.shape[0] * index_shape.heads_programs
    programs = latent_programs + key_programs + query_programs + parts
    if programs:
        prepare_attention_kernel[(programs,)](
            *turn[:4], *write[:6],
            heads, k, transform.norm_weight, transform.norm_bias,
            rows[0].cos, rows[0].sin, rows[1].cos, rows[1].sin, slots, view.data, q_out,
            num_latents, k.shape[0], latent_programs, key_programs, query_programs,
            *turn[4:], *write[6:8],
            heads.stride(0), heads.stride(1), k.stride(0), view.stride,
            write[8], transform.norm_eps,
            *shape, *latent_shape.constants(), *index_shape.constants(),
            num_warps=tile.num_warps, **UNFUSED,
        )  # fmt: skip
    return out, q_out


def _turn(
    x: Tensor, rows: RopeRows, out: Tensor, tile: RowsTile
) -> tuple[tuple[Any, ...], tuple[int | bool, ...], int]:
    """(x, cos, sin, out and strides), constants and programs of turning x [R, H, D_r]."""
    num_heads, dim = x.shape[1], x.shape[2]
    heads = heads_of(x) if x.numel() else x
    block = padded(min(num_heads, tile.turned))
    given = (heads, rows.cos, rows.sin, out, *heads.stride()[:2], *out.stride()[:2])
    constants = (num_heads, dim, block, padded(dim), rows.is_interleaved)
    return given, constants, x.shape[0] * triton.cdiv(num_heads, block) if x.numel() else 0


def _write(
    latent: LatentWrite, tile: RowsTile
) -> tuple[tuple[Any, ...], LatentShape, tuple[int, int]]:
    """(kv, weight, cos, sin, slots, pool, strides, eps), shape, (rows, programs) of a write."""
    kv, weight, eps, rows, pool, slots = latent
    kv, view = with_neighbours(kv), PoolView.of(pool)
    given = (kv, weight, rows.cos, rows.sin, slots, view.data, kv.stride(0), view.stride, eps)
    shape = LatentShape(tile.latents, weight.shape[0], rows.dim, view, rows.is_interleaved)
    num_rows = kv.shape[0]
    return given, shape, (num_rows, triton.cdiv(num_rows, tile.latents))


FUSIONS: dict[str, Callable[..., Any]] = {
    "prepare_attention": prepare_attention,
    "write_latent_and_rope": write_latent_and_rope,
}
