"""Matrix products with plain weights whose bits do not hang on the number of rows.

In:  x [M, K] and weight [N, K] (`linear`), or x [M, H, K] and weight [H, K, N] (`multiply_heads`);
     fp32, bf16 or fp16, weights of any strides. Out: [M, N] in a dtype of choice; [M, H, N].
One tile for every M: K is summed in fp32 from the first column on, in steps of constant depth. A
narrow weight's K is cut into parts, whose number follows from N and K, added first to last.
So a row's bits hang on the row and the weight alone. fp32 is multiplied in fp32, not in TF32.
Not here: FP8 (linear.py), experts (moe.py), products that may choose by M (ops/products.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.providers.triton.attention_tiles import has_wgmma
from gnomon.attention.providers.triton.language import dot_into, padded, round_to

NARROW = 4096  # outputs of a weight up to which tiles are of 64 columns
LEAST_DEPTH = 384  # of a part of K
MOST_PARTS = 16
MOST_PROGRAMS = 64  # that one block of rows is cut into for the sake of few rows
BLOCK = 1024  # numbers of a result that a program of add_parts computes


@dataclass(frozen=True, slots=True)
class FixedTile:
    """Rows x columns of a program, columns of x a step, parts of K."""

    rows: int
    columns: int
    depth: int
    parts: int = 1
    stages: int = 3


@triton.jit(do_not_specialize=["num_rows"])
def multiply_fixed(
    x, weight, out, num_rows, N, K,
    x_row, x_head, w_head, w_k, w_n, out_part, out_row, out_head,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile [BM, BN], head, part of K); GROUP_M row blocks pass over all columns at once.

    Rows and columns beyond the edge read something that exists; nothing of it is stored.
    """
    num_m, num_n = tl.cdiv(num_rows, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first_m = pid // (GROUP_M * num_n) * GROUP_M
    height = tl.minimum(num_m - first_m, GROUP_M)
    inside = pid % (GROUP_M * num_n)
    row = ((first_m + inside % height) * BM + tl.arange(0, BM)).to(tl.int64)
    n = (inside // height * BN + tl.arange(0, BN)).to(tl.int64)
    n_read = n
    if not EVEN_N:
        n_read = tl.minimum(n, N - 1)
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x + head * x_head + tl.minimum(row, num_rows - 1)[:, None] * x_row + k[None, :]
    w_at = weight + head * w_head + n_read[None, :] * w_n + k[:, None] * w_k
    depth = tl.cdiv(tl.cdiv(K, BK), PARTS) * BK
    begin = tl.program_id(2) * depth
    acc = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + depth, K), BK, num_stages=STAGES):
        if EVEN_K:
            rows = tl.load(x_at + start)
            columns = tl.load(w_at + start * w_k)
        else:
            is_in = start + k < K
            rows = tl.load(x_at + start, mask=is_in[None, :], other=0.0)
            columns = tl.load(w_at + start * w_k, mask=is_in[:, None], other=0.0)
        acc = dot_into(rows, columns, acc)
    to = out + part * out_part + head * out_head + row[:, None] * out_row + n[None, :]
    keep = (row < num_rows)[:, None] & (n < N)[None, :]
    tl.store(to, round_to(acc, out.dtype.element_ty), mask=keep)


@triton.jit
def add_parts(parts, out, step, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Out [step] = the sum of parts [PARTS, step] fp32, first to last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < step
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * step + at, mask=is_in, other=0.0)
    tl.store(out + at, round_to(total, out.dtype.element_ty), mask=is_in)


def choose_fixed_tile(
    num_columns: int, depth: int, dtype: torch.dtype, on_hopper: bool, is_narrow: bool
) -> FixedTile:
    """The tile of a weight of ``num_columns`` outputs and ``depth`` inputs, for every M."""
    columns = min(64 if is_narrow else 128, padded(num_columns, 16))
    tiles = -(-num_columns // columns)
    parts = max(1, min(MOST_PARTS, depth // LEAST_DEPTH, MOST_PROGRAMS // tiles))
    if dtype == torch.float32:  # IEEE products do without tensor cores
        return FixedTile(32, min(columns, 64), min(32, padded(depth, 16)), parts, 2)
    return FixedTile(64, columns, min(64, padded(depth, 16)), parts, 4 if on_hopper else 3)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[M, N] of ``dtype`` (None: x's) of x [M, K] and weight [N, K] in one dtype."""
    num_columns, depth = weight.shape
    is_narrow, is_hopper = num_columns <= NARROW, has_wgmma(x.device)
    tile = choose_fixed_tile(num_columns, depth, x.dtype, is_hopper, is_narrow)
    out = torch.empty(x.shape[0], num_columns, dtype=dtype or x.dtype, device=x.device)
    if tile.parts == 1:
        run_fixed(x[:, None], weight.T[None], out[None, :, None], tile)
        return out
    shape = (tile.parts, x.shape[0], 1, num_columns)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    run_fixed(x[:, None], weight.T[None], parts, tile)
    if out.numel():
        add_parts[(triton.cdiv(out.numel(), BLOCK),)](parts, out, out.numel(), tile.parts, BLOCK)
    return out


def multiply_heads(x: Tensor, weight: Tensor, is_packed: bool = True) -> Tensor:
    """[M, H, N] of x [M, H, K] and weight [H, K, N], contiguous whether asked for or not."""
    _, depth, num_columns = weight.shape
    tile = choose_fixed_tile(num_columns, depth, x.dtype, has_wgmma(x.device), False)
    tile = replace(tile, parts=1)  # heads are programs enough
    out = x.new_empty((*x.shape[:2], num_columns))
    run_fixed(x, weight, out[None], tile)
    return out


def run_fixed(x: Tensor, weight: Tensor, out: Tensor, tile: FixedTile) -> None:
    """Products of x [M, H, K] and weight [H, K, N] into out [parts, M, H, N]."""
    num_rows, num_heads, depth = x.shape
    if out.numel() == 0:
        return
    x = x if x.stride(2) == 1 else x.contiguous()
    num_columns = weight.shape[2]
    programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    multiply_fixed[(programs, num_heads, tile.parts)](
        x, weight, out, num_rows, num_columns, depth,
        x.stride(0), x.stride(1), *weight.stride(), *out.stride()[:3],
        BM=tile.rows, BN=tile.columns, BK=tile.depth, PARTS=tile.parts, GROUP_M=8,
        EVEN_N=num_columns % tile.columns == 0, EVEN_K=depth % tile.depth == 0,
        STAGES=tile.stages, num_warps=4,
    )  # fmt: skip


FIXED: dict[str, Callable[..., Any]] = {"linear": linear, "multiply_heads": multiply_heads}
