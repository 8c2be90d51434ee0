"""Device kernels of the index scores: contiguous keys, paged keys, and FP8 codes of rows.

In:  queries [M, H, D], head weights [M, H], keys in one table or in pages, counts [M].
Out: fp32 scores: Σ_h w · relu(q_h · k), a key's and a query's scale multiplied in after the dot.
A tile is BLOCK keys by ROWS · HEADS queries. A score's bits hang on the row, the key and the tile's
     shape alone: neither on the other rows, nor on where a block of keys begins.
Dots: KEYS is "plain" (the stored numbers, as the layout reads them), "codes" (e4m3 by e4m3) or
     "decoded" (e4m3 codes widened exactly, where the device has no e4m3 dot).
NaN: relu keeps it, so a bad key shows in the score. Padded heads and columns are zero, or masked.
Not here: sizes of tiles, grids, views of pools (index.py). Maths: oracle_math.md §1.5.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.language import (
    decode_e4m3,
    dot,
    encode_e4m3,
    is_finite,
    power_of_two_scale,
    round_to,
)

MIN_INDEX_AMAX = tl.constexpr(1e-4)  # layouts/float8.py


@triton.jit
def relu(x):
    """max(x, 0), NaN for NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def weighted_sum(
    s, weight, head, H: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """[BLOCK, ROWS] of per-head products s [BLOCK, ROWS · HEADS] and weights [ROWS · HEADS]."""
    s = relu(s) * weight[None, :]
    if H != HEADS:
        s = tl.where((head < H)[None, :], s, 0.0)  # an infinite key makes NaN of a padded head
    if ROWS == 1:
        return tl.sum(s, 1)[:, None]
    else:
        return tl.sum(tl.reshape(s, [BLOCK, ROWS, HEADS]), 2)


@triton.jit
def index_scale(x):
    """Scales [n] of rows x [n, D] (fp32), as layouts/float8.py has them for index keys."""
    amax = tl.max(tl.where(is_finite(x), tl.abs(x), 0.0), 1)
    return power_of_two_scale(tl.math.div_rn(tl.maximum(amax, MIN_INDEX_AMAX), 448.0))


@triton.jit
def scores_kernel(
    q_ptr,
    weights_ptr,
    q_scale_ptr,
    keys_ptr,
    key_scale_ptr,
    count_ptr,
    out_ptr,
    scale,
    num_rows,
    num_keys,
    q_row,
    q_head,
    weights_row,
    keys_row,
    out_row,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CODES: tl.constexpr,
    FILLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (g, p): rows g · ROWS on against the p-th part of the keys that any of them sees.

    IS_CODES: q [rows padded to ROWS, HEADS, DIM] and keys [padded to BLOCK, DIM] are e4m3, with
    nothing to mask. FILLS: columns behind a row's count become −inf, else they may stay unwritten.
    """
    group, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows = group * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, ROWS * HEADS)
    head = column % HEADS
    row = (group * ROWS + column // HEADS).to(tl.int64)
    d = tl.arange(0, DIM)
    is_head = (row < num_rows) & (head < H)
    q_at = q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :]
    weight = tl.load(weights_ptr + row * weights_row + head, mask=is_head, other=0.0)
    weight = weight.to(tl.float32) * scale
    if IS_CODES:
        q = tl.load(q_at)
        weight *= tl.load(q_scale_ptr + row * HEADS + head)
    else:
        q = tl.load(q_at, mask=is_head[:, None] & (d < D)[None, :], other=0.0)
    seen = tl.load(count_ptr + rows, mask=rows < num_rows, other=0)
    num_blocks = tl.cdiv(tl.minimum(tl.max(seen, 0), num_keys), BLOCK)
    share = tl.cdiv(num_blocks, num_parts)
    out_at = out_ptr + rows.to(tl.int64)[None, :] * out_row
    q = tl.trans(q)
    for block in tl.range(
        part * share, tl.minimum(part * share + share, num_blocks), num_stages=STAGES
    ):
        key = block * BLOCK + tl.arange(0, BLOCK)
        keys_at = keys_ptr + key.to(tl.int64)[:, None] * keys_row + d[None, :]
        if IS_CODES:
            s = dot(tl.load(keys_at), q)
        else:
            is_key = (key < num_keys)[:, None]
            if D != DIM:
                is_key = is_key & (d < D)[None, :]
            s = dot(tl.load(keys_at, mask=is_key, other=0.0), q)
        found = weighted_sum(s, weight, head, H, HEADS, ROWS, BLOCK)
        if IS_CODES:
            found *= tl.load(key_scale_ptr + key)[:, None]
        is_seen = key[:, None] < seen[None, :]
        if FILLS:
            found = tl.where(is_seen, found, float("-inf"))
            is_seen = (key < num_keys)[:, None] & (rows < num_rows)[None, :]
        tl.store(out_at + key[:, None], found, mask=is_seen)
    if FILLS:
        nothing = tl.full([BLOCK, ROWS], float("-inf"), tl.float32)
        for block in range(num_blocks + part, tl.cdiv(num_keys, BLOCK), num_parts):
            key = block * BLOCK + tl.arange(0, BLOCK)
            inside = (key < num_keys)[:, None] & (rows < num_rows)[None, :]
            tl.store(out_at + key[:, None], nothing, mask=inside)


@triton.jit
def paged_scores_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    key_scale_ptr,
    pages_ptr,
    request_ptr,
    count_ptr,
    out_ptr,
    scale,
    width,
    least,
    q_row,
    q_head,
    weights_row,
    pages_row,
    keys_page,
    scale_page,
    out_row,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CAST: tl.constexpr,
    NATIVE: tl.constexpr,
    FILLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (p, m): row m against the p-th part of its own keys, through its pages.

    The pages of row m are those of request[m], or row m of ``pages`` where request_ptr is None.
    Rows that see at most ``least`` keys are left out. keys_page, scale_page: strides of a page in
    numbers of keys_ptr and of key_scale_ptr. CAST: what plain numbers are rounded to ("bf16",
    "fp16") before they are multiplied in the query's dtype; "wide": that alone; "": they have it.
    """
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    seen = tl.minimum(tl.load(count_ptr + row), width)
    seen = tl.where(seen > least, seen, 0)
    owner = row
    if request_ptr is not None:
        owner = tl.maximum(tl.load(request_ptr + row), 0).to(tl.int64)
    num_blocks = tl.cdiv(seen, BLOCK)
    share = tl.cdiv(num_blocks, num_parts)
    first, last = part * share, tl.minimum(part * share + share, num_blocks)
    out_at = out_ptr + row * out_row
    if first < last:
        head, d = tl.arange(0, HEADS), tl.arange(0, DIM)
        is_q = (head < H)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + row * q_row + head[:, None] * q_head + d[None, :], mask=is_q, other=0.0)
        weight = tl.load(weights_ptr + row * weights_row + head, mask=head < H, other=0.0)
        weight = weight.to(tl.float32) * scale
        if KEYS == "codes":
            wide = q.to(tl.float32)
            q_scale = index_scale(wide)
            weight *= q_scale
            # The scale is a power of two: its reciprocal is exact.
            q = encode_e4m3(wide * (1.0 / q_scale)[:, None], NATIVE)
            q = q.to(tl.float8e4nv, bitcast=True)
        q = tl.trans(q)
        for block in tl.range(first, last, num_stages=STAGES):
            key = block * BLOCK + tl.arange(0, BLOCK)
            page_at = pages_ptr + owner * pages_row + key // PAGE
            page = tl.load(page_at, mask=key < seen, other=0).to(tl.int64)
            keys_at = keys_ptr + page[:, None] * keys_page + (key % PAGE)[:, None] * D + d[None, :]
            if D == DIM:
                k = tl.load(keys_at)
            else:
                k = tl.load(keys_at, mask=(d < D)[None, :], other=0)
            if KEYS == "decoded":
                k = round_to(decode_e4m3(k, NATIVE), q.dtype)
            elif CAST == "bf16":
                k = round_to(k.to(tl.float32), tl.bfloat16).to(q.dtype)
            elif CAST == "fp16":
                k = round_to(k.to(tl.float32), tl.float16).to(q.dtype)
            elif CAST == "wide":
                k = k.to(q.dtype)
            found = tl.sum(weighted_sum(dot(k, q), weight, head, H, HEADS, 1, BLOCK), 1)
            if KEYS != "plain":
                found *= tl.load(key_scale_ptr + page * scale_page + key % PAGE)
            if FILLS:
                found = tl.where(key < seen, found, float("-inf"))
                tl.store(out_at + key, found, mask=key < width)
            else:
                tl.store(out_at + key, found, mask=key < seen)
    if FILLS:
        nothing = tl.full([BLOCK], float("-inf"), tl.float32)
        for block in range(num_blocks + part, tl.cdiv(width, BLOCK), num_parts):
            key = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(out_at + key, nothing, mask=key < width)


@triton.jit
def encode_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    num_rows,
    x_outer,
    x_inner,
    INNER: tl.constexpr,
    PADDED_INNER: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes [.., PADDED_INNER, DIM] and scales of x [num_rows, INNER, D]; padding is all zeros."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    outer, inner, d = (place // PADDED_INNER).to(tl.int64), place % PADDED_INNER, tl.arange(0, DIM)
    inside = ((outer < num_rows) & (inner < INNER))[:, None] & (d < D)[None, :]
    x_at = x_ptr + outer[:, None] * x_outer + inner[:, None] * x_inner + d[None, :]
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    scale = index_scale(x)
    codes = encode_e4m3(x * (1.0 / scale)[:, None], NATIVE)
    tl.store(codes_ptr + place.to(tl.int64)[:, None] * DIM + d[None, :], codes)
    tl.store(scale_ptr + place, scale)


@triton.jit
def gather_codes_kernel(
    codes_ptr,
    scale_ptr,
    pages_ptr,
    codes_out,
    scale_out,
    num_keys,
    codes_page,
    scale_page,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes [padded, DIM] and scales of the first num_keys entries of ``pages``; then zeros."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_key, d = key < num_keys, tl.arange(0, DIM)
    page = tl.load(pages_ptr + key // PAGE, mask=is_key, other=0).to(tl.int64)
    at = codes_ptr + page[:, None] * codes_page + (key % PAGE)[:, None] * D + d[None, :]
    codes = tl.load(at, mask=is_key[:, None] & (d < D)[None, :], other=0)
    scale = tl.load(scale_ptr + page * scale_page + key % PAGE, mask=is_key, other=0.0)
    tl.store(codes_out + key.to(tl.int64)[:, None] * DIM + d[None, :], codes)
    tl.store(scale_out + key, scale)
