"""Products of few rows with narrow plain weights that read one input, K in parts: wk and the head
weights of an indexer in one launch (the latter alone where wk is FP8), a router's logits.

In:  x [M, K] in bf16 or fp16, `first` [N1, K] (None: N1 is 0) and `second` [P * N2, K], P matrices
     whose sum is the weight, one below the other; all of x's dtype.
Out: `index_products`: x · firstᵀ in x's dtype and x · (Σ_p second_p)ᵀ in fp32.
     `narrow_sums`: parts [S, M, N1 + N2] fp32 whose sum, first to last, both are.
     `route_products`: what route.py makes of the logits; it adds the parts itself.
Products are exact, only their sums are fp32. A narrow weight is read by few programs, so K is cut
until there are enough of them; how K is cut follows from K alone.
Not here: many rows, where a library is as fast (None is given: the products run one by one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.ops.routing import RouterRule, Routing
from gnomon.attention.providers.triton.attention_tiles import can_launch_early, has_wgmma
from gnomon.attention.providers.triton.language import dot_into, padded, round_to
from gnomon.attention.providers.triton.route import Logits, route_logits

MOST_ROWS = 256
COLUMNS = 64  # of a program
DEPTH = 64  # columns of x a step
LEAST_DEPTH = 384  # of a part of K
MOST_PARTS = 16
BLOCK = 512


@triton.jit
def narrow_product(
    x, weight, row, n, k, begin, end, x_row, w_row, part_step, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    SWAP: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BM, BN] fp32: columns begin .. end − 1 of rows of x times those of PARTS weights."""
    x_at = x + row[:, None] * x_row + k[None, :]
    w_at = weight + n[:, None] * w_row + k[None, :]
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    for part in tl.static_range(PARTS):
        for start in tl.range(begin, end, BK, num_stages=STAGES):
            if EVEN_K:
                rows = tl.load(x_at + start)
                columns = tl.load(w_at + part * part_step + start)
            else:
                is_in = (start + k < K)[None, :]
                rows = tl.load(x_at + start, mask=is_in, other=0.0)
                columns = tl.load(w_at + part * part_step + start, mask=is_in, other=0.0)
            if SWAP:
                acc = dot_into(columns, tl.trans(rows), acc)
            else:
                acc = dot_into(rows, tl.trans(columns), acc)
    return tl.trans(acc) if SWAP else acc


@triton.jit(do_not_specialize=["num_rows"])
def multiply_narrow(
    x, first, second, sums, num_rows, N1, N2, K, x_row, first_row, second_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, HAS_FIRST: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, first weight first; part of K; block of rows).

    Rows and columns beyond the last read some that exist; nothing of it is stored.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    read = tl.minimum(row, num_rows - 1).to(tl.int64)
    k = tl.arange(0, BK)
    depth = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    begin = split * depth
    end = tl.minimum(begin + depth, K)
    tiles = tl.cdiv(N1, BN) if HAS_FIRST else 0
    column = (tile - tiles) * BN + tl.arange(0, BN)
    if HAS_FIRST and tile < tiles:
        column = tile * BN + tl.arange(0, BN)
        n = tl.minimum(column, N1 - 1).to(tl.int64)
        acc = narrow_product(
            x, first, read, n, k, begin, end, x_row, first_row, 0, K,
            BM, BN, BK, 1, SWAP, EVEN_K, STAGES,
        )  # fmt: skip
        keep = column < N1
    else:
        n = tl.minimum(column, N2 - 1).to(tl.int64)
        part_stride = tl.cast(N2, tl.int64) * second_row  # N2 of 1 is a constant, without .to
        acc = narrow_product(
            x, second, read, n, k, begin, end, x_row, second_row, part_stride, K,
            BM, BN, BK, PARTS, SWAP, EVEN_K, STAGES,
        )  # fmt: skip
        keep = column < N2
        column += N1
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    to = sums + (split.to(tl.int64) * num_rows + row[:, None]) * (N1 + N2) + column[None, :]
    tl.store(to, acc, mask=(row < num_rows)[:, None] & keep[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def add_narrow(
    sums, first, second, num_rows, N1, N2,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One row's sums over all parts of K, first to last: N1 columns of ``first``, N2 of the other.

    Splits behind the end of K hold zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = N1 + N2
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        at = sums + (split * num_rows.to(tl.int64) + row) * width + column
        total += tl.load(at, mask=column < width, other=0.0)
    is_first = column < N1
    tl.store(first + row * N1 + column, round_to(total, first.dtype.element_ty), mask=is_first)
    is_second = (column >= N1) & (column < width)
    tl.store(second + row * N2 + column - N1, total, mask=is_second)


def narrow_sums(x: Tensor, first: Tensor | None, second: Tensor, num_columns: int) -> Tensor:
    """Module docstring; ``num_columns``: N2."""
    (num_rows, depth), num_first = x.shape, 0 if first is None else first.shape[0]
    parts = second.shape[0] // num_columns
    splits = max(1, min(MOST_PARTS, depth // LEAST_DEPTH))
    sums = torch.empty(
        (splits, num_rows, num_first + num_columns), dtype=torch.float32, device=x.device
    )
    rows, step = min(64, padded(num_rows, 16)), min(DEPTH, padded(depth, 16))
    tiles = triton.cdiv(num_first, COLUMNS) + triton.cdiv(num_columns, COLUMNS)
    is_hopper = has_wgmma(x.device)
    multiply_narrow[(tiles, splits, triton.cdiv(num_rows, rows))](
        x, second if first is None else first, second, sums,
        num_rows, num_first, num_columns, depth,
        x.stride(0), 0 if first is None else first.stride(0), second.stride(0),
        BM=rows, BN=COLUMNS, BK=step, PARTS=parts, SPLITS=splits, HAS_FIRST=first is not None,
        SWAP=rows < 64, EVEN_K=depth % step == 0, STAGES=6 if is_hopper else 3,
        IS_EARLY=can_launch_early(x.device), num_warps=4,
    )  # fmt: skip
    return sums


def index_products(
    x: Tensor, first: Tensor | None, second: Tensor, num_columns: int
) -> tuple[Tensor | None, Tensor] | None:
    """(x · firstᵀ [M, N1], x · (Σ second)ᵀ [M, N2] fp32); None for many rows or none."""
    if not _is_served(x, second if first is None else first, second):
        return None
    sums = narrow_sums(x, first, second, num_columns)
    splits, num_rows, width = sums.shape
    num_first = 0 if first is None else first.shape[0]
    other = torch.empty((num_rows, num_columns), dtype=torch.float32, device=x.device)
    one = None if first is None else x.new_empty((num_rows, num_first))
    is_early = can_launch_early(x.device)
    block = min(BLOCK, padded(width))
    add_narrow[(num_rows, triton.cdiv(width, block))](
        sums, other if one is None else one, other, num_rows, num_first, num_columns,
        splits, block, is_early,
        **({"launch_pdl": True} if is_early else {}),
    )  # fmt: skip
    return one, other


def route_products(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    request: Tensor | None,
    rule: RouterRule,
) -> Routing | None:
    """Routing by x · (Σ router)ᵀ, router [P * E, K] of E experts; None for many rows or none."""
    if not _is_served(x, router):
        return None
    sums = narrow_sums(x, None, router, bias.shape[0])
    logits = Logits(sums, is_early=can_launch_early(x.device))
    return route_logits(logits, bias, request, rule, False)


def _is_served(x: Tensor, *weights: Tensor) -> bool:
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    is_half &= all(weight.dtype == x.dtype for weight in weights)
    are_rows = x.stride(1) == 1 and all(weight.stride(1) == 1 for weight in weights)
    return is_half and are_rows and 0 < x.shape[0] <= MOST_ROWS


FUSIONS: dict[str, Callable[..., Any]] = {
    "index_products": index_products,
    "route_products": route_products,
}
