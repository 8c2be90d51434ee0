"""Products by head whose results are given in FP8: W_UV and what the output's product reads.

In:  x [M, H, K] in bf16, fp16 or fp32 and a weight [H, K, N] of its dtype, N a multiple of 128.
Out: codes [M, H * N] and scales per 128 columns, as quantise_rows makes them of the products
     rounded to x's dtype. Layout of the scales: linear_quantise.py. Sums are fp32, over all of K.
For few rows (a step that decodes): the weight passes once, and nothing but codes is written.
Maths: oracle_math.md §1.2, §4.1. Not here: products of many rows, which a library makes faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.ops.products import by_head
from gnomon.attention.providers.triton.attention_tiles import has_wgmma
from gnomon.attention.providers.triton.language import (
    dot_into,
    encode_e4m3,
    has_native_fp8,
    is_finite,
    padded,
    round_to,
)
from gnomon.attention.providers.triton.linear_quantise import GROUP, empty_rows, quantise_rows
from gnomon.attention.providers.triton.products import row_scale

FEW_PROGRAMS = 64  # of blocks of 64 rows: below, blocks of 16 keep more processors busy


@triton.jit(do_not_specialize=["num_rows", "s_group"])
def multiply_heads_quantise(
    x, weight, codes, scales, num_rows, K,
    x_row, x_head, w_head, w_k, w_n, c_row, s_group,
    N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, IS_POWER_OF_TWO: tl.constexpr, NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BM rows of one group of 128 columns of one head.

    SWAP: the weight is the tall operand, for blocks of less than 64 rows. Rows beyond the last read
    one that exists; nothing of it is stored.
    """
    TILES: tl.constexpr = N // 128
    num_m = tl.cdiv(num_rows, BM)
    pid = tl.program_id(0)
    group = pid // num_m  # row blocks of one group follow each other: they read the same weights
    head, tile = (group // TILES).to(tl.int64), group % TILES
    row = pid % num_m * BM + tl.arange(0, BM)
    read = tl.minimum(row, num_rows - 1).to(tl.int64)
    n = tile * 128 + tl.arange(0, 128)
    k = tl.arange(0, BK)
    x_at = x + head * x_head + read[:, None] * x_row + k[None, :]
    w_at = weight + head * w_head + n[:, None] * w_n + k[None, :] * w_k
    if SWAP:
        acc = tl.zeros((128, BM), tl.float32)
    else:
        acc = tl.zeros((BM, 128), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN_K:
            rows = tl.load(x_at + start)
            columns = tl.load(w_at + start * w_k)
        else:
            is_in = (start + k < K)[None, :]
            rows = tl.load(x_at + start, mask=is_in, other=0.0)
            columns = tl.load(w_at + start * w_k, mask=is_in, other=0.0)
        if SWAP:
            acc = dot_into(columns, tl.trans(rows), acc)
        else:
            acc = dot_into(rows, tl.trans(columns), acc)
    if SWAP:
        acc = tl.trans(acc)
    value = round_to(acc, x.dtype.element_ty).to(tl.float32)
    scale = row_scale(tl.max(tl.where(is_finite(value), tl.abs(value), 0.0), 1), IS_POWER_OF_TWO)
    ratio = tl.math.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    is_live = row < num_rows
    to = codes + row.to(tl.int64)[:, None] * c_row + group * 128 + tl.arange(0, 128)[None, :]
    tl.store(to, encode_e4m3(ratio, NATIVE), mask=is_live[:, None])
    tl.store(scales + group.to(tl.int64) * s_group + row, scale, mask=is_live)


def heads_quantise(x: Tensor, weight: Tensor, is_power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Module docstring; weights of other widths are multiplied and quantised one by one."""
    (num_rows, num_heads, depth), width = x.shape, weight.shape[2]
    if width % GROUP or num_rows == 0 or depth == 0:
        return quantise_rows(by_head(x, weight, True).flatten(1), is_power_of_two)
    x = x if x.stride(2) == 1 else x.contiguous()
    codes, scales = empty_rows(num_rows, num_heads * width, x.device)
    num_groups = num_heads * width // GROUP
    is_hopper = has_wgmma(x.device)
    is_few = num_groups * triton.cdiv(num_rows, 64) < FEW_PROGRAMS
    rows = 16 if is_few else min(64, padded(num_rows, 16))
    step = min(128 // x.element_size(), padded(depth, 16))
    multiply_heads_quantise[(num_groups * triton.cdiv(num_rows, rows),)](
        x, weight, codes.view(torch.uint8), scales, num_rows, depth,
        x.stride(0), x.stride(1), *weight.stride(), codes.stride(0), scales.stride(1),
        N=width, BM=rows, BK=step, SWAP=rows < 64, EVEN_K=depth % step == 0,
        IS_POWER_OF_TWO=is_power_of_two, NATIVE=has_native_fp8(x.device),
        STAGES=6 if is_hopper and rows < 64 else 4, num_warps=4 if is_hopper else 8,
    )  # fmt: skip
    return codes, scales


FUSIONS: dict[str, Callable[..., Any]] = {"heads_quantise": heads_quantise}
