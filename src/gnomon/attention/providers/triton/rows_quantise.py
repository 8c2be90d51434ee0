"""A norm, with its residual or without, whose rows are given in FP8 as well, in one launch.

In:  x [R, D] and perhaps delta [R, D], or the Summands of one, which is added first; the norm's
     weight; the kind of scale.
Out: x + delta, its norm, and the norm's codes and scales per 128 columns, each as rms_norm (or
     add_rms_norm) and quantise_rows would give it, to the bit.
Maths: oracle_math.md §1.1, §4.1. Layout of the scales: linear_quantise.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.ops.values import Summands
from gnomon.attention.providers.triton.language import (
    UNFUSED,
    divide,
    encode_e4m3,
    finite_amax,
    has_native_fp8,
    padded,
    round_to,
    rounded,
)
from gnomon.attention.providers.triton.linear_quantise import GROUP, empty_rows
from gnomon.attention.providers.triton.products import row_scale
from gnomon.attention.providers.triton.rows import num_warps, rows_of

Quantised = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]


@triton.jit(do_not_specialize=["scale_stride"])
def norm_quantise_kernel(
    x,
    delta,
    weight,
    total,
    out,
    codes,
    scales,
    ids,
    stride,
    delta_stride,
    part_stride,
    scale_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    IS_SUM: tl.constexpr,
    IS_POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One row; BLOCK is a multiple of 128. A delta in parts is summed, then rounded, then added."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        at = delta + row * delta_stride + column
        if not IS_SUM:
            value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        else:
            added = tl.zeros((BLOCK,), tl.float32)
            for part in tl.static_range(PARTS):
                is_there = inside
                if HAS_IDS:
                    is_there = inside & (tl.load(ids + row * PARTS + part) >= 0)
                added += tl.load(at + part * part_stride, mask=is_there, other=0.0).to(tl.float32)
            value += rounded(added, total.dtype.element_ty)
        value = rounded(value, total.dtype.element_ty)
        tl.store(total + row * D + column, round_to(value, total.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / D + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = rounded(value * scale * gain, out.dtype.element_ty)
    tl.store(out + row * D + column, round_to(normed, out.dtype.element_ty), mask=inside)
    GROUPS: tl.constexpr = BLOCK // 128
    groups = tl.reshape(normed, (GROUPS, 128))
    group_scale = row_scale(finite_amax(groups, 1), IS_POWER_OF_TWO)
    wide_scale = tl.broadcast_to(group_scale[:, None], groups.shape)
    inverse = tl.broadcast_to(tl.math.div_rn(1.0, group_scale)[:, None], groups.shape)
    ratio = divide(groups, wide_scale, inverse)
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(codes + row * D + at, encode_e4m3(ratio, NATIVE), mask=at < D)
    place = scales + group.to(tl.int64) * scale_stride + row
    tl.store(place, group_scale, mask=group * 128 < D)


def norm_quantise(
    x: Tensor, delta: Tensor | Summands | None, weight: Tensor, eps: float, is_power_of_two: bool
) -> Quantised:
    """(x + delta, rms_norm of that, (codes, scales) of the norm); x itself without a delta."""
    if isinstance(delta, Summands) and delta.dtype != x.dtype:
        delta = delta.total()
    rows, (added, ids) = rows_of(x), _parts_of(x, delta)
    num_rows, width = rows.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(out)
    codes, scales = empty_rows(num_rows, width, x.device)
    if num_rows:
        norm_quantise_kernel[(num_rows,)](
            rows,
            added,
            weight,
            total,
            out,
            codes.view(torch.uint8),
            scales,
            added if ids is None else ids,
            rows.stride(0),
            added.stride(1),
            added.stride(0),
            scales.stride(1),
            eps,
            width,
            padded(width, GROUP),
            delta is not None,
            added.shape[0],
            ids is not None,
            isinstance(delta, Summands),
            is_power_of_two,
            has_native_fp8(x.device),
            num_warps=num_warps(width),
            **UNFUSED,
        )
    return total, out, (codes, scales)


def _parts_of(x: Tensor, delta: Tensor | Summands | None) -> tuple[Tensor, Tensor | None]:
    """(parts [P, R, D] with neighbouring columns, ids or None); x's rows where nothing is added."""
    if isinstance(delta, Summands):
        return delta.parts, delta.ids
    return rows_of(x if delta is None else delta)[None], None


FUSIONS: dict[str, Callable[..., Any]] = {"norm_quantise": norm_quantise}
