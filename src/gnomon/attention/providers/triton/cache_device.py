"""What one program does for the cache: write a latent, write some index keys, turn index queries.

In:  whole arrays with their strides, the program's row or block of rows. Out: bytes of pools, and
     the turned queries. Kernels (cache.py, prepare.py) put these together into launches.
fp32 from the load to the end; rounded once to the input's dtype, then as the layout rounds.
Maths: oracle_math.md §1.2–1.5.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.layouts import fp8_ds_mla_656
from gnomon.attention.providers.triton.language import round_to
from gnomon.attention.providers.triton.layout_rows import (
    clear_empty_rope,
    round_as_index,
    store_index_keys,
    store_latent,
    store_latent_rope,
    token_at,
)
from gnomon.attention.providers.triton.rows_device import (
    hadamard,
    layer_normed,
    neighbours,
    partner_of,
    rotated_heads,
)

EMPTY_ROPE_SLOT = tl.constexpr(fp8_ds_mla_656.EMPTY_ROPE_SLOT)


@triton.jit
def write_latent(
    row,
    kv,
    weight,
    cos,
    sin,
    slots,
    pool,
    kv_stride,
    pool_stride,
    eps,
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
    """Norm, rotate and store row ``row`` of kv [N, RANK + ROPE]; a slot < 0 stores nothing.

    A plain pool is one group: GROUP = RANK.
    """
    slot = tl.load(slots + row)
    if slot >= 0:
        here = kv + row * kv_stride
        group = tl.arange(0, GROUPS_BLOCK)[:, None]
        within = tl.arange(0, GROUP_BLOCK)[None, :]
        column = group * GROUP + within
        inside = (within < GROUP) & (column < RANK)
        value = tl.load(here + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / RANK + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        latent = round_to(value * scale * gain, kv.dtype.element_ty).to(tl.float32)
        token = token_at(pool, slot, pool_stride, PAGE, WIDTH)
        if IS_PACKED:
            store_latent(token, latent, RANK, GROUP, NATIVE)
        else:
            tl.store(token + column, round_to(latent, pool.dtype.element_ty), mask=inside)
        if IS_PACKED and ROPE == 0 and WIDTH > RANK + RANK // GROUP * 4:
            clear_empty_rope(token, RANK, GROUP, EMPTY_ROPE_SLOT)
        if ROPE > 0:
            at = tl.arange(0, ROPE_BLOCK)[None, :]
            turned = rotated_heads(
                here + RANK,
                cos + row * ROPE,
                sin + row * ROPE,
                0,
                0,
                1,
                ROPE,
                ROPE,
                1,
                ROPE_BLOCK,
                IS_INTERLEAVED,
            )
            rope = round_to(turned, kv.dtype.element_ty).to(tl.float32)
            if IS_PACKED:
                store_latent_rope(token, rope, RANK, GROUP, ROPE)
            else:
                rounded = round_to(rope, pool.dtype.element_ty)
                tl.store(token + RANK + at, rounded, mask=at < ROPE)


@triton.jit
def write_index_keys(
    first,
    num_rows,
    k,
    weight,
    bias,
    cos,
    sin,
    slots,
    pool,
    k_stride,
    pool_stride,
    eps,
    ROWS_BLOCK: tl.constexpr,
    DI: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_HADAMARD: tl.constexpr,
    SCALE: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    IS_PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """LayerNorm, rotate, maybe Hadamard and store rows first .. first + ROWS_BLOCK − 1 of k."""
    row = first + tl.arange(0, ROWS_BLOCK).to(tl.int64)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=-1)
    column = tl.arange(0, BLOCK)[None, :]
    inside = is_row[:, None] & (column < DI)
    here = k + row[:, None] * k_stride
    value = tl.load(here + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1)[:, None] / DI
    spread = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(spread * spread, 1)[:, None] / DI + eps)
    key = layer_normed(here, mean, scale, weight, bias, column, inside)
    if DIM > 0:
        if IS_INTERLEAVED:
            partner = neighbours(key)
        else:
            beside = partner_of(column, DIM)
            partner = layer_normed(here, mean, scale, weight, bias, beside, inside)
        turning = is_row[:, None] & (column < DIM)
        c = tl.load(cos + row[:, None] * DIM + column, mask=turning, other=1.0).to(tl.float32)
        s = tl.load(sin + row[:, None] * DIM + column, mask=turning, other=0.0).to(tl.float32)
        key = key * c + partner * s
    if HAS_HADAMARD:
        key = hadamard(key, BLOCK, SCALE, k.dtype.element_ty != tl.float32)
    key = round_to(key, k.dtype.element_ty).to(tl.float32)
    if IS_PACKED:
        store_index_keys(pool, slot, key, pool_stride, PAGE, DI, NATIVE)
    else:
        token = token_at(pool, slot, pool_stride, PAGE, DI)[:, None]
        stored = (slot >= 0)[:, None] & (column < DI)
        tl.store(token + column, round_to(key, pool.dtype.element_ty), mask=stored)


@triton.jit
def turn_index_queries(
    row,
    first,
    q,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    DI: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_HADAMARD: tl.constexpr,
    SCALE: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rotate, maybe Hadamard, maybe round as a key: heads of row ``row`` of q, to out [R, H, D]."""
    value = rotated_heads(
        q + row * row_stride,
        cos + row * DIM,
        sin + row * DIM,
        head_stride,
        first,
        HEADS,
        DI,
        DIM,
        HEADS_BLOCK,
        BLOCK,
        IS_INTERLEAVED,
    )
    if HAS_HADAMARD:
        value = hadamard(value, BLOCK, SCALE, q.dtype.element_ty != tl.float32)
    value = round_to(value, q.dtype.element_ty)
    if IS_ROUNDED:
        value = round_to(round_as_index(value.to(tl.float32), NATIVE), q.dtype.element_ty)
    head = first + tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < DI)
    tl.store(out + (row * HEADS + head) * DI + column, value, mask=inside)
