"""Device kernels of the index scores of plain keys in one table, and of keys in pages.

In:  queries [M, H, D], head weights [M, H], keys in one table or in pages, counts [M].
Out: fp32 scores: Σ_h w · relu(q_h · k), a key's and a query's scale multiplied in after the dot.
A tile is BLOCK keys by ROWS · HEADS queries. A score's bits hang on the row, the key and the tile's
     shape alone: neither on the other rows, nor on where a block of keys begins.
Dots: KEYS is "plain" (the stored numbers, as the layout reads them), "codes" (e4m3 by e4m3) or
     "decoded" (e4m3 codes widened exactly, where the device has no e4m3 dot).
NaN: relu keeps it, so a bad key shows in the score. Padded heads and columns are zero, or masked.
Not here: FP8 codes of keys in one table (index_codes.py), tiles and views of pools
(index_views.py), grids (index_launch.py). Maths: oracle_math.md §1.5.
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
def twice_relu(x):
    """2 max(x, 0) of finite x, NaN for NaN: an addition, which has twice the rate of a maximum."""
    return x + tl.abs(x)


@triton.jit
def weighted_sum(
    s, weight, head, H: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """[BLOCK, ROWS] of rectified products s [BLOCK, ROWS · HEADS] and weights [ROWS · HEADS]."""
    s *= weight[None, :]
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
def blocks_of(count_ptr, group, num_rows, num_keys, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """First and last block of this program's part, and up to where all rows of the group see all.

    By numbers that the compiler knows to be the same in all threads: a loop whose bounds come out
    of a block of counts keeps addresses of shared memory a thread, at 30 instructions a step.
    """
    is_full = group * ROWS + ROWS <= num_rows  # else rows are stored with a mask
    least, most = tl.where(is_full, num_keys, 0), 0
    for place in tl.static_range(ROWS):
        count = tl.load(count_ptr + tl.minimum(group * ROWS + place, num_rows - 1))
        least, most = tl.minimum(least, count), tl.maximum(most, count)
    num_blocks = tl.cdiv(tl.minimum(most, num_keys), BLOCK)
    share = tl.cdiv(num_blocks, tl.num_programs(1))
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, num_blocks)
    return first, tl.maximum(tl.minimum(last, least // BLOCK), first), last


@triton.jit(
    do_not_specialize=["num_rows", "num_keys"], do_not_specialize_on_alignment=["count_ptr"]
)
def scores_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
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
):
    """Program (g, p): rows g · ROWS on against the p-th part of the keys that any of them sees.

    What lies behind a row's count stays unwritten.
    """
    group = tl.program_id(0)
    rows = group * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, ROWS * HEADS)
    head = column % HEADS
    row = (group * ROWS + column // HEADS).to(tl.int64)
    d = tl.arange(0, DIM)
    is_head = (row < num_rows) & (head < H)
    q_at = q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :]
    weight = tl.load(weights_ptr + row * weights_row + head, mask=is_head, other=0.0)
    weight = weight.to(tl.float32) * scale
    q = tl.trans(tl.load(q_at, mask=is_head[:, None] & (d < D)[None, :], other=0.0))
    seen = tl.minimum(tl.load(count_ptr + rows, mask=rows < num_rows, other=0), num_keys)
    first, whole, last = blocks_of(count_ptr, group, num_rows, num_keys, ROWS, BLOCK)
    inner, is_column = tl.arange(0, BLOCK), (d < D)[None, :]
    keys_at = inner.to(tl.int64)[:, None] * keys_row + d[None, :]
    out_at = out_ptr + rows.to(tl.int64)[None, :] * out_row + inner[:, None]
    if q.dtype == tl.float32:
        whole = first  # fp32 is multiplied out of registers, which two loops have not enough of
    else:
        for block in range(first, whole):  # all rows see all of these
            begin = block * BLOCK
            block_at = keys_ptr + begin.to(tl.int64) * keys_row + keys_at
            if D == DIM:
                keys = tl.load(block_at)
            else:
                keys = tl.load(block_at, mask=is_column, other=0.0)
            s = relu(dot(keys, q))
            tl.store(out_at + begin, weighted_sum(s, weight, head, H, HEADS, ROWS, BLOCK))
    for block in tl.range(whole, last, num_stages=1):
        begin = block * BLOCK
        key = (begin + inner)[:, None]
        block_at = keys_ptr + begin.to(tl.int64) * keys_row + keys_at
        s = relu(dot(tl.load(block_at, mask=(key < num_keys) & is_column, other=0.0), q))
        found = weighted_sum(s, weight, head, H, HEADS, ROWS, BLOCK)
        tl.store(out_at + begin, found, mask=key < seen[None, :])


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=["count_ptr"])
def hide_tails_kernel(count_ptr, out_ptr, num_columns, out_row, BLOCK: tl.constexpr):
    """Program m: −inf in row m from its count on."""
    row = tl.program_id(0)
    count = tl.maximum(tl.load(count_ptr + row), 0)
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(count // BLOCK * BLOCK, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_tail = (column >= count) & (column < num_columns)
        tl.store(out_ptr + row.to(tl.int64) * out_row + column, nothing, mask=is_tail)


@triton.jit(
    do_not_specialize=["width", "least", "pages_row"],
    do_not_specialize_on_alignment=["pages_ptr", "request_ptr", "count_ptr"],
)
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
            weight *= 0.5 * q_scale
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
            s = dot(k, q)
            s = twice_relu(s) if KEYS == "codes" else relu(s)
            found = tl.sum(weighted_sum(s, weight, head, H, HEADS, 1, BLOCK), 1)
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
