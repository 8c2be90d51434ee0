"""Device kernels of FP8 index keys in one table: their scores, and the codes that these multiply.

In:  rows that are e4m3 codes times a power of two, or a pool's codes and scales; counts [M].
Out: codes and scales, padded with zeros; fp32 scores: Σ_h w · relu(q_h · k), scales multiplied in.
A tile is BLOCK keys by ROWS · HEADS queries; a score's bits are those of paged_scores_kernel.
Cost: of each product of a query and a key one addition and one multiply-add are left to the plain
     ALUs, which are the limit beside the tensor cores. So whole blocks are stored without masks,
     a block's address is one number, and a thread keeps to the registers that let four programs
     share a multiprocessor (Tile.registers): one multiplies while others sum.
Not here: tiles (index_views.py), grids (index_launch.py). Maths: oracle_math.md §1.5.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.index_tiles import (
    blocks_of,
    index_scale,
    twice_relu,
    weighted_sum,
)
from gnomon.attention.providers.triton.language import dot, encode_e4m3


@triton.jit(
    do_not_specialize=["num_rows", "num_keys"], do_not_specialize_on_alignment=["count_ptr"]
)
def code_scores_kernel(
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
    weights_row,
    out_row,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (g, p): rows g · ROWS on against the p-th part of the keys that any of them sees.

    q [rows padded to ROWS, HEADS, DIM], keys [padded to BLOCK, DIM]. What lies behind a row's count
    stays unwritten.
    """
    group = tl.program_id(0)
    rows = group * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, ROWS * HEADS)
    head = column % HEADS
    row = (group * ROWS + column // HEADS).to(tl.int64)
    is_head = (row < num_rows) & (head < H)
    weight = tl.load(weights_ptr + row * weights_row + head, mask=is_head, other=0.0)
    weight = weight.to(tl.float32) * scale
    weight *= 0.5 * tl.load(q_scale_ptr + row * HEADS + head)
    inner, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    q = tl.trans(tl.load(q_ptr + (row * HEADS + head)[:, None] * DIM + d[None, :]))
    seen = tl.minimum(tl.load(count_ptr + rows, mask=rows < num_rows, other=0), num_keys)
    first, whole, last = blocks_of(count_ptr, group, num_rows, num_keys, ROWS, BLOCK)
    keys_at = inner[:, None] * DIM + d[None, :]
    out_at = out_ptr + rows.to(tl.int64)[None, :] * out_row + inner[:, None]
    for block in range(first, whole):  # all rows see all of these
        begin = block * BLOCK
        key_scale = tl.load(key_scale_ptr + begin + inner)
        s = twice_relu(dot(tl.load(keys_ptr + begin.to(tl.int64) * DIM + keys_at), q))
        found = weighted_sum(s, weight, head, H, HEADS, ROWS, BLOCK) * key_scale[:, None]
        tl.store(out_at + begin, found)
    for block in tl.range(whole, last, num_stages=1):
        begin = block * BLOCK
        key_scale = tl.load(key_scale_ptr + begin + inner)
        s = twice_relu(dot(tl.load(keys_ptr + begin.to(tl.int64) * DIM + keys_at), q))
        found = weighted_sum(s, weight, head, H, HEADS, ROWS, BLOCK) * key_scale[:, None]
        tl.store(out_at + begin, found, mask=(begin + inner)[:, None] < seen[None, :])


@triton.jit(do_not_specialize=["num_rows"])
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


@triton.jit(do_not_specialize=["num_keys"], do_not_specialize_on_alignment=["pages_ptr"])
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
