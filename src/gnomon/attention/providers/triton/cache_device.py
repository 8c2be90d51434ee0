"""What one program does for the cache: write latents, write index keys, turn index queries.

In:  whole arrays with their strides, the program's row or block of rows. Out: bytes of pools, and
     the turned queries. Kernels (cache.py, prepare.py) put these together into launches.
fp32 from the load to the end; rounded once to the input's dtype, then as the layout rounds.
Maths: oracle_math.md §1.2–1.5.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.layouts import fp8_ds_mla_656
from gnomon.attention.providers.triton.language import round_to, rounded
from gnomon.attention.providers.triton.layout_rows import (
    clear_empty_rope,
    pack_latent,
    round_as_index,
    store_index_keys,
    store_latent_rope,
    token_at,
)
from gnomon.attention.providers.triton.rows_device import (
    hadamard,
    neighbours,
    partner_of,
    rotated,
    rotated_heads,
    turns,
)

EMPTY_ROPE_SLOT = tl.constexpr(fp8_ds_mla_656.EMPTY_ROPE_SLOT)


@triton.jit
def write_latents(
    first,
    num_rows,
    kv,
    weight,
    cos,
    sin,
    slots,
    pool,
    kv_stride,
    pool_stride,
    eps,
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
    """Norm, rotate and store rows first .. first + ROWS_BLOCK − 1 of kv [N, RANK + ROPE].

    A slot < 0 stores nothing. A plain pool is one group: GROUP = RANK. Everything is asked for
    before anything is waited for: a program's time is that of its loads one after another. Masks
    have the block's whole shape, so that one layout of its numbers over the threads serves all.
    """
    row = first + tl.arange(0, ROWS_BLOCK).to(tl.int64)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=-1)
    here = kv + row * kv_stride
    at = tl.arange(0, GROUPS_BLOCK * GROUP_BLOCK)[None, :]
    column = at
    if GROUP != GROUP_BLOCK:
        column = tl.where(
            at % GROUP_BLOCK < GROUP, at // GROUP_BLOCK * GROUP + at % GROUP_BLOCK, RANK
        )
    inside = is_row[:, None] & (column < RANK)
    value = tl.load(here[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    token = token_at(pool, slot, pool_stride, PAGE, WIDTH)
    is_kept = slot >= 0
    if ROPE > 0:
        place = tl.arange(0, ROPE_BLOCK)[None, :]
        turn = (row * ROPE)[:, None]
        turning = is_row[:, None] & (place < ROPE)
        c, s = turns(cos + turn, sin + turn, place, is_row[:, None], ROPE)
        turned = rotated((here + RANK)[:, None], c, s, turning, place, ROPE, IS_INTERLEAVED)
        rope = rounded(turned, kv.dtype.element_ty)
        if IS_PACKED:
            store_latent_rope(token, rope, is_kept, RANK, GROUP, ROPE)
        else:
            stored = is_kept[:, None] & (place < ROPE)
            to = (token + RANK)[:, None] + place
            tl.store(to, round_to(rope, pool.dtype.element_ty), mask=stored)
    scale = tl.rsqrt(tl.sum(value * value, 1) / RANK + eps)
    latent = rounded(value * scale[:, None] * gain, kv.dtype.element_ty)
    stored = is_kept[:, None] & (column < RANK)
    if IS_PACKED:
        shape: tl.constexpr = (ROWS_BLOCK, GROUPS_BLOCK, GROUP_BLOCK)
        codes = pack_latent(token, tl.reshape(latent, shape), is_kept, RANK, GROUP, NATIVE)
        codes = tl.reshape(codes, latent.shape)
        tl.store(token[:, None] + column, codes, mask=stored)
        if ROPE == 0 and WIDTH > RANK + RANK // GROUP * 4:
            clear_empty_rope(token, is_kept, RANK, GROUP, EMPTY_ROPE_SLOT)
    else:
        tl.store(token[:, None] + column, round_to(latent, pool.dtype.element_ty), mask=stored)


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
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if DIM > 0:
        turn = (row * DIM)[:, None]
        c, s = turns(cos + turn, sin + turn, column, is_row[:, None], DIM)
        if not IS_INTERLEAVED:
            beside = partner_of(column, DIM)
            other = tl.load(here + beside, mask=inside, other=0.0).to(tl.float32)
            other_w = tl.load(weight + beside, mask=inside, other=0.0).to(tl.float32)
            other_b = tl.load(bias + beside, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1)[:, None] / DI
    spread = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(spread * spread, 1)[:, None] / DI + eps)
    key = tl.where(inside, (value - mean) * scale * w + b, 0.0)
    if DIM > 0:
        if IS_INTERLEAVED:
            partner = neighbours(key)
        else:
            partner = tl.where(inside, (other - mean) * scale * other_w + other_b, 0.0)
        key = key * c + partner * s
    if HAS_HADAMARD:
        key = hadamard(key, BLOCK, SCALE, k.dtype.element_ty != tl.float32)
    key = rounded(key, k.dtype.element_ty)
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
    if IS_ROUNDED:
        value = round_as_index(rounded(value, q.dtype.element_ty), NATIVE)
    head = first + tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < DI)
    place = out + (row * HEADS + head) * DI + column
    tl.store(place, round_to(value, q.dtype.element_ty), mask=inside)
