"""Matrix products with tall weights, dense or by expert: one kernel for bf16, fp32 and block FP8.

In:  rows of x, a weight [N, K] or one of each expert [E, N, K]; for FP8 also the scales of x's rows
     (per 128 columns) and of the weight's blocks (128 × 128).
Out: products of every row; or, where FUSED, silu(gate) · up of a weight [2 N, K] whose first half
     is the gate, quantised again where the weights are FP8.
Tiles: with few rows (SWAP) the weight is the tall operand (WGMMA's M) and rows of x are its
     columns, 16 and up: a step streams weights and pads little. A block of rows belongs to one
     expert. FP8 products are summed in fp32 per 128 columns of K and scaled before they are added
     (oracle_math.md §4.1).
IS_EARLY (sm_90 and newer): what adds the splits may be launched while the last ones are stored,
and waits for them itself.
STAGES is given to the loop itself, so that scales are fetched ahead too, not only what is
     multiplied; num_stages alone loads them in the middle of each step, and the widest tile spills.
A row's bits depend on the row and on the tile's sizes alone. Not here: which sizes (tiles.py),
sorting by expert (moe_sort.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.language import (
    INTERPRETED,
    decode_e4m3,
    dot,
    dot_into,
    encode_e4m3,
    power_of_two_scale,
    round_to,
)

GROUP = tl.constexpr(128)  # columns of one scale
MIN_AMAX = tl.constexpr(1e-4)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def row_scale(amax, IS_POWER_OF_TWO: tl.constexpr):
    """Scales of groups of values, from their largest finite magnitudes."""
    scale = tl.math.div_rn(tl.maximum(amax, MIN_AMAX), tl.full(amax.shape, E4M3_MAX, tl.float32))
    if IS_POWER_OF_TWO:
        scale = power_of_two_scale(scale)
    return scale


@triton.jit
def operand(x, NATIVE: tl.constexpr):
    """What the tensor cores multiply: e4m3 itself, or, where they cannot, its exact fp16 value."""
    if NATIVE or x.dtype != tl.uint8:
        return x
    else:
        return decode_e4m3(x, False).to(tl.float16)


@triton.jit
def scaled_step(
    acc, w, x, w_scale, x_scale, SWAP: tl.constexpr, IS_FP8: tl.constexpr, NATIVE: tl.constexpr
):
    """``acc`` [BM, BN] ([BN, BM] if SWAP) plus x [BM, BK] · w [BN, BK]ᵀ, scaled where FP8."""
    if IS_FP8:
        w = operand(w, NATIVE)
        x = operand(x, NATIVE)
        if SWAP:
            return acc + dot(w, tl.trans(x)) * (w_scale * x_scale)[None, :]
        else:
            return acc + dot(x, tl.trans(w)) * (w_scale * x_scale)[:, None]
    elif SWAP:
        return dot_into(w, tl.trans(x), acc)
    else:
        return dot_into(x, tl.trans(w), acc)


@triton.jit
def tile_of(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """(row block, column tile): GROUP_M row blocks pass over all tiles before the next ones."""
    per_group = GROUP_M * num_n
    first = pid // per_group * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    inside = pid % per_group
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=["num_rows", "num_m", "xs_group", "s_expert", "s_row", "os_group"])
def multiply(
    x,
    x_scales,
    weight,
    scales,
    shares,
    out,
    out_scales,
    pairs,
    expert_of_block,
    num_blocks,
    num_rows,
    num_n,
    K,
    k_split,
    num_m,
    x_stride,
    xs_row,
    xs_group,
    w_expert,
    w_row,
    s_expert,
    s_row,
    out_split,
    out_stride,
    os_row,
    os_group,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    IS_FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    FUSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    IS_POWER_OF_TWO: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EARLY: tl.constexpr,
    PER_BLOCK: tl.constexpr,
):
    """One tile [BM, BN] of out [num_rows, num_n], over k_split of K.

    With experts, ``pairs`` [blocks * BM] names the row of ``out`` of each column, num_rows where
    there is none; x's row is pair // TOP_K; PER_BLOCK tiles in turn belong to one expert. Without,
    column and row are the same.
    """
    m, n_tile = tile_of(tl.program_id(0), num_m, tl.cdiv(num_n, BN), GROUP_M)
    column = tl.arange(0, BM)
    if HAS_EXPERTS:
        if m >= tl.load(num_blocks) * PER_BLOCK:
            return
        if PER_BLOCK > 1:  # noqa: SIM102  # one is known when it is compiled
            if tl.load(pairs + m * BM) >= num_rows:  # dead columns stand behind live ones
                return
        expert = tl.load(expert_of_block + m // PER_BLOCK).to(tl.int64)
        pair = tl.load(pairs + m * BM + column)
    else:
        expert = tl.full((), 0, tl.int64)
        pair = m * BM + column
    is_live = pair < num_rows
    # Dead columns and rows beyond the edge read something that exists; nothing of it is stored.
    row = tl.where(is_live, pair // TOP_K, 0).to(tl.int64)
    n_first = n_tile * BN
    n_read = tl.minimum(n_first + tl.arange(0, BN), num_n - 1).to(tl.int64)
    k = tl.arange(0, BK)
    per_split = K if not IS_SPLIT else k_split
    per_split = tl.cdiv(per_split, BK) * BK
    first = tl.program_id(1) * per_split
    last = tl.minimum(first + per_split, K)

    x_at = x + row[:, None] * x_stride + k[None, :]
    w_at = weight + expert * w_expert + n_read[:, None] * w_row + k[None, :]
    xs_at = x_scales + row * xs_row
    s_at = scales + expert * s_expert + (n_first // GROUP) * s_row
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
        up = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(first, last, BK, num_stages=STAGES):
        if EVEN_K:
            xb = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            is_in = (start + k < K)[None, :]
            xb = tl.load(x_at + start, mask=is_in, other=0.0)
            w = tl.load(w_at + start, mask=is_in, other=0.0)
        x_scale = tl.zeros((BM,), tl.float32)
        w_scale = 0.0
        if IS_FP8:
            x_scale = tl.load(xs_at + start // GROUP * xs_group)
            w_scale = tl.load(s_at + start // GROUP)
        acc = scaled_step(acc, w, xb, w_scale, x_scale, SWAP, IS_FP8, NATIVE)
        if FUSED:
            u_at = w_at + num_n * w_row + start
            if EVEN_K:
                u = tl.load(u_at)
            else:
                u = tl.load(u_at, mask=(start + k < K)[None, :], other=0.0)
            u_scale = 0.0
            if IS_FP8:
                u_scale = tl.load(s_at + num_n // GROUP * s_row + start // GROUP)
            up = scaled_step(up, u, xb, u_scale, x_scale, SWAP, IS_FP8, NATIVE)

    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP:
        acc = tl.trans(acc)
        up = tl.trans(up)
    if HAS_EXPERTS:  # read again: registers are what the loop needs most
        pair = tl.load(pairs + m * BM + column)
        is_live = pair < num_rows
    n = n_tile * BN + tl.arange(0, BN)
    keep = is_live[:, None] & (n < num_n)[None, :]
    place = pair.to(tl.int64)
    out_at = out + place[:, None] * out_stride + n[None, :]
    if IS_SPLIT:
        out_at += tl.program_id(1).to(tl.int64) * out_split
    if FUSED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
        if IS_FP8:  # BN is one group of the product that follows
            size = tl.where(tl.abs(acc) < float("inf"), tl.abs(acc), 0.0)
            scale = row_scale(tl.max(size, 1), IS_POWER_OF_TWO)
            tl.store(out_scales + place * os_row + n_tile * os_group, scale, mask=is_live)
            # out holds e4m3 seen as bytes
            ratio = tl.math.div_rn(acc, tl.broadcast_to(scale[:, None], acc.shape))
            tl.store(out_at, encode_e4m3(ratio, NATIVE), mask=keep)
            return
    if HAS_SHARES:
        acc = acc * tl.load(shares + pair, mask=is_live, other=0.0).to(tl.float32)[:, None]
    tl.store(out_at, round_to(acc, out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits(
    parts, out, num_rows, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):
    """Out [num_rows, width] = the sum of parts [SPLITS, num_rows, width] fp32, first to last."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * num_rows + row) * width + at, mask=is_in, other=0.0)
    tl.store(out + row * width + at, round_to(total, out.dtype.element_ty), mask=is_in)


__all__ = ["INTERPRETED", "add_splits", "multiply", "row_scale"]
