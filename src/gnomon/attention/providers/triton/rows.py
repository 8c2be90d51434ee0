"""Row-wise operators in Triton: rms_norm, layer_norm, rope, and a norm fused with its residual.

In:  x [..., D] in fp32, bf16 or fp16, last dim contiguous (else copied). Out: new tensors.
fp32 inside, one rounding. One program per row and a block of all its columns, so a row's bits
depend on that row alone. Maths: oracle_math.md §1.1, §1.3, §1.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.ops.values import RopeRows
from gnomon.attention.providers.triton.language import UNFUSED, padded, round_to, rounded
from gnomon.attention.providers.triton.rows_device import layer_normed, rotated_heads

NUM_WARPS = 4  # of rotations and writes, alone or joined: the same bits in either
GROUP = 128  # least block of a norm: as rows_quantise.py has it, for the same bits
HEADS_BLOCK = 32  # heads that one program of rope turns


def num_warps(width: int) -> int:
    """Warps for a block of ``width`` columns: about 8 numbers or more a thread."""
    return max(1, min(16, padded(width) // 256))


@triton.jit
def rms_norm_kernel(x, weight, out, stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """One row: x * rsqrt(mean(x²) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / D + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = round_to(value * scale * gain, out.dtype.element_ty)
    tl.store(out + row * D + column, normed, mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x, delta, weight, total, out, stride, delta_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: total = x + delta, rounded; out = its norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(delta + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = rounded(value, total.dtype.element_ty)
    tl.store(total + row * D + column, round_to(value, total.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / D + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = round_to(value * scale * gain, out.dtype.element_ty)
    tl.store(out + row * D + column, normed, mask=inside)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """One row: (x − mean) * rsqrt(var + eps) * weight + bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    here = x + row * stride
    value = tl.load(here + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value) / D
    spread = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(spread * spread) / D + eps)
    normed = layer_normed(here, mean, scale, weight, bias, column, inside)
    tl.store(out + row * D + column, round_to(normed, out.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Some heads of one row, rotated."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS_BLOCK
    turned = rotated_heads(
        x + row * row_stride,
        cos + row * DIM,
        sin + row * DIM,
        head_stride,
        first,
        HEADS,
        WIDTH,
        DIM,
        HEADS_BLOCK,
        BLOCK,
        IS_INTERLEAVED,
    )
    head = first + tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    place = out + (row * HEADS + head) * WIDTH + column
    inside = (head < HEADS) & (column < WIDTH)
    tl.store(place, round_to(turned, out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dim: x * (mean(x²) + eps)^-1/2 * weight."""
    rows, out = rows_of(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows.shape[0]:
        width = rows.shape[1]
        rms_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            out,
            rows.stride(0),
            eps,
            width,
            padded(width, GROUP),
            num_warps=num_warps(width),
            **UNFUSED,
        )
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, rms_norm(x + delta, weight, eps)), as the two calls would give to the bit."""
    rows, added = rows_of(x), rows_of(delta)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(total)
    if rows.shape[0]:
        width = rows.shape[1]
        add_rms_norm_kernel[(rows.shape[0],)](
            rows,
            added,
            weight,
            total,
            out,
            rows.stride(0),
            added.stride(0),
            eps,
            width,
            padded(width, GROUP),
            num_warps=num_warps(width),
            **UNFUSED,
        )
    return total, out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x − mean) * (var + eps)^-1/2 * weight + bias over the last dim."""
    rows, out = rows_of(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows.shape[0]:
        width = rows.shape[1]
        layer_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            bias,
            out,
            rows.stride(0),
            eps,
            width,
            padded(width),
            num_warps=num_warps(width),
            **UNFUSED,
        )
    return out


def rope(x: Tensor, rows: RopeRows) -> Tensor:
    """Rotate the first ``rows.dim`` columns of x [R, ..., D]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    heads = heads_of(x)
    num_heads, width = heads.shape[1:]
    block = padded(min(num_heads, HEADS_BLOCK))
    rope_kernel[(heads.shape[0], triton.cdiv(num_heads, block))](
        heads,
        rows.cos,
        rows.sin,
        out,
        heads.stride(0),
        heads.stride(1),
        num_heads,
        width,
        rows.dim,
        block,
        padded(width),
        rows.is_interleaved,
        num_warps=NUM_WARPS,
        **UNFUSED,
    )
    return out


def heads_of(x: Tensor) -> Tensor:
    """View x [R, ..., D] as [R, heads, D] with neighbouring columns; copy only if it must be."""
    heads = x.reshape(x.shape[0], -1, x.shape[-1])
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def rows_of(x: Tensor) -> Tensor:
    """View x [..., D] as [M, D] with neighbouring columns; copy only if it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


KERNELS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rope": rope,
}
FUSIONS: dict[str, Callable[..., Any]] = {"add_rms_norm": add_rms_norm}
