"""dense_mha of the triton provider: blocks of rows share the keys that they read.

In:  q [M, H, D], k [N, H, D], v [N, H, Dv] (any strides), visible [M] int32 (0 .. N, in any
     order), scale > 0; ``out`` (out, lse) to write into.
Out: (out [M, H, Dv] in q's dtype, lse [M, H] fp32 natural); a row that sees nothing: 0 and −inf.
A block of rows stops at the largest count among them, and masks nothing before the least one. Keys
are taken from the first on in blocks of constant size, so a row's bits hang on its own data alone.
D is cut into a power of two and a rest (192 = 128 + 64), so that products waste no columns.
Maths: oracle_math.md §1.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.providers.triton.attention_tiles import has_wgmma
from gnomon.attention.providers.triton.language import dot, dot_into, padded, round_to

LN_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-1.0e30)  # where a running maximum starts: finite, below any logit
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DenseTile:
    """Rows and keys of a block and how it is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@triton.jit
def load_block(base, place, column, place_step, column_step, limit, FIRST: tl.constexpr,
               WIDTH: tl.constexpr, IS_MASKED: tl.constexpr):  # fmt: skip
    """[places, columns] from column FIRST on; zeros at places >= limit and columns >= WIDTH."""
    at = base + place[:, None] * place_step + (FIRST + column)[None, :] * column_step
    IS_PADDED: tl.constexpr = FIRST + column.shape[0] > WIDTH
    if IS_MASKED and IS_PADDED:
        mask = (place < limit)[:, None] & (FIRST + column < WIDTH)[None, :]
        return tl.load(at, mask=mask, other=0.0)
    elif IS_MASKED:
        return tl.load(at, mask=(place < limit)[:, None], other=0.0)
    elif IS_PADDED:
        return tl.load(at, mask=(FIRST + column < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def attend_keys(
    state, query, rest, keys, values, seen, bounds, steps, scale,
    D: tl.constexpr, DV: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, DVP: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys bounds[0] .. bounds[1] − 1 to (acc, largest, total); masked by ``seen`` or all."""
    acc, largest, total = state
    k_step, k_column, v_step, v_column = steps
    begin, end = bounds
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        place = start + tl.arange(0, BN)
        at = place.to(tl.int64)
        a = load_block(keys, at, tl.arange(0, DA), k_step, k_column, end, 0, D, IS_MASKED)
        logits = dot(query, tl.trans(a))
        if DB > 0:
            b = load_block(keys, at, tl.arange(0, DB), k_step, k_column, end, DA, D, IS_MASKED)
            logits = dot_into(rest, tl.trans(b), logits)
        if IS_MASKED:
            logits = tl.where(place[None, :] < seen[:, None], logits, float("-inf"))
        raised = tl.maximum(largest, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - raised[:, None])
        fade = tl.exp2(largest - raised)
        total = total * fade + tl.sum(weights, 1)
        v = load_block(values, at, tl.arange(0, DVP), v_step, v_column, end, 0, DV, IS_MASKED)
        acc = dot_into(round_to(weights, v.dtype), v, acc * fade[:, None])
        largest = raised
    return acc, largest, total


@triton.jit(do_not_specialize=["num_rows"])
def attend_dense(
    q, k, v, visible, out, lse, scale, num_rows,
    q_row, q_head, q_column, k_row, k_head, k_column, v_row, v_head, v_column,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DA: tl.constexpr, DB: tl.constexpr, DVP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of BM rows, the last first as it reads most; head). ``scale`` in base 2."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    wide = row.to(tl.int64)
    is_row = row < num_rows
    seen = tl.load(visible + row, mask=is_row, other=0)
    most = tl.max(seen, 0)
    least = tl.min(tl.where(is_row, seen, 0x7FFFFFFF), 0) // BN * BN
    queries = q + head * q_head
    query = load_block(queries, wide, tl.arange(0, DA), q_row, q_column, num_rows, 0, D, True)
    rest = query
    if DB > 0:
        rest = load_block(queries, wide, tl.arange(0, DB), q_row, q_column, num_rows, DA, D, True)
    state = (
        tl.zeros([BM, DVP], tl.float32),
        tl.full([BM], LEAST, tl.float32),
        tl.zeros([BM], tl.float32),
    )
    keys, values = k + head * k_head, v + head * v_head
    steps = (k_row, k_column, v_row, v_column)
    state = attend_keys(
        state, query, rest, keys, values, seen, (0, least), steps, scale,
        D, DV, DA, DB, DVP, BN, STAGES, False,
    )  # fmt: skip
    acc, largest, total = attend_keys(
        state, query, rest, keys, values, seen, (least, most), steps, scale,
        D, DV, DA, DB, DVP, BN, STAGES, True,
    )  # fmt: skip
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    acc = acc * (1.0 / total)[:, None]
    level = tl.where(is_empty, float("-inf"), (largest + tl.log2(total)) * LN_2)
    column = tl.arange(0, DVP)
    to = out + (wide[:, None] * H + head) * DV + column[None, :]
    mask = is_row[:, None] & (column < DV)[None, :]
    tl.store(to, round_to(acc, out.dtype.element_ty), mask=mask)
    tl.store(lse + wide * H + head, level, mask=is_row)


def choose_dense_tile(
    width: int, value_width: int, dtype: torch.dtype, on_hopper: bool = True
) -> DenseTile:
    """The tile for heads of these widths. It hangs on nothing else: neither do a row's bits."""
    if dtype == torch.float32:
        # IEEE products do without tensor cores: all of a tile is in registers.
        return DenseTile(32 if value_width <= 128 else 16, 16, 4, 1)
    if not on_hopper:  # at most 99 KB of shared memory; values of 256 fill 128 threads' registers
        return DenseTile(64, 32, 4 if value_width <= 128 else 8, 2)
    if max(padded(width), padded(value_width)) > 256:
        return DenseTile(64, 32, 8, 2)
    if value_width > 128:  # as many keys as 64 x 3 would take 256 KB
        return DenseTile(128, 32, 8, 3)
    return DenseTile(128, 64, 8, 3)


def cut(width: int) -> tuple[int, int]:
    """A power of two and the padded rest of a head's width; the rest may be 0."""
    whole = padded(width, 16)
    if whole == width or whole <= 32:
        return whole, 0
    half = whole // 2
    rest = padded(width - half, 16)
    return (whole, 0) if rest == half else (half, rest)


def dense_mha(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, out: Result | None = None
) -> Result:
    """Row m of q attends the first visible[m] of k and v; all heads have keys of their own."""
    tile = choose_dense_tile(q.shape[2], v.shape[2], q.dtype, has_wgmma(q.device))
    return run_dense((q, k, v), visible, scale, tile, out)


def run_dense(
    qkv: tuple[Tensor, Tensor, Tensor],
    visible: Tensor,
    scale: float,
    tile: DenseTile,
    out: Result | None = None,
) -> Result:
    """Launch with a given tile; no launch for no rows."""
    q, k, v = qkv
    num_rows, num_heads, width = q.shape
    shape = (num_rows, num_heads, v.shape[2])
    results = out or (q.new_empty(shape), q.new_empty(shape[:2], dtype=torch.float32))
    if q.numel() == 0:
        return results
    if not (results[0].is_contiguous() and results[1].is_contiguous()):
        inner = run_dense(qkv, visible, scale, tile)
        return results[0].copy_(inner[0]), results[1].copy_(inner[1])
    first, rest = cut(width)
    attend_dense[(-(-num_rows // tile.rows), num_heads)](
        q, k, v, visible, *results, scale * math.log2(math.e), num_rows,
        *q.stride(), *k.stride(), *v.stride(),
        H=num_heads, D=width, DV=v.shape[2], DA=first, DB=rest, DVP=padded(v.shape[2], 16),
        BM=tile.rows, BN=tile.keys, STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
    return results
