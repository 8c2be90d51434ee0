"""Rows to e4m3 codes with a scale per 128 columns, plain or of silu(gate) · up.

In:  x [M, K], or hidden [M, 2 I] with the gate's columns first; fp32, bf16 or fp16.
Out: codes [M, K] e4m3 and scales [M, ceil(K / 128)] fp32. The scales lie column by column, columns
     a multiple of four rows apart: what a TMA load of DeepGEMM takes as it is.
Maths: oracle_math.md §4.1 (act_quant), divisions as IEEE has them, so that codes equal the
reference's; a number that is not finite becomes NaN and takes no part in its group's scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.providers.triton.language import (
    IS_INTERPRETED,
    divide,
    encode_e4m3,
    finite_amax,
    has_native_fp8,
    padded,
)
from gnomon.attention.providers.triton.products import row_scale

GROUP = 128
GROUPS_AT_ONCE = 8


@triton.jit(do_not_specialize=["num_rows", "s_group"])
def quantise(
    x, codes, scales, num_rows, K, x_stride, s_group,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WITH_SILU: tl.constexpr,
    IS_POWER_OF_TWO: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """ROWS rows, GROUPS groups of one program; K columns of codes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    keep = (row < num_rows)[:, None, None] & (k < K)[None, :, :]
    at = row.to(tl.int64)[:, None, None] * x_stride + k[None, :, :]
    values = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    if WITH_SILU:
        up = tl.load(x + at + K, mask=keep, other=0.0).to(tl.float32)
        values = values / (1.0 + tl.exp(-values)) * up
    scale = row_scale(finite_amax(values, 2), IS_POWER_OF_TWO)
    inverse = tl.math.div_rn(1.0, scale)
    ratio = divide(
        values,
        tl.broadcast_to(scale[:, :, None], values.shape),
        tl.broadcast_to(inverse[:, :, None], values.shape),
    )
    out = row.to(tl.int64)[:, None, None] * K + k[None, :, :]
    tl.store(codes + out, encode_e4m3(ratio, NATIVE), mask=keep)
    is_group = (row < num_rows)[:, None] & (group * 128 < K)[None, :]
    tl.store(scales + group[None, :].to(tl.int64) * s_group + row[:, None], scale, mask=is_group)


def empty_rows(num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes [num_rows, width] and scales [num_rows, groups] as the module docstring lays them."""
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    height = max(4, -(-num_rows // 4) * 4)
    columns = torch.empty(-(-width // GROUP), height, dtype=torch.float32, device=device)
    return codes, columns.t()[:num_rows]


def as_operand(values: Tensor, is_native: bool) -> Tensor:
    """A product's operand as kernels read it: codes as bytes where the device cannot multiply them.

    The interpreter multiplies e4m3 itself.
    """
    if values.dtype != torch.float8_e4m3fn or is_native or IS_INTERPRETED:
        return values
    return values.view(torch.uint8)


def quantise_rows(x: Tensor, is_power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [M, K]."""
    return _quantise(x, x.shape[1], False, is_power_of_two)


def silu_quantise(hidden: Tensor, is_power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of silu(gate) · up, hidden [M, 2 I]."""
    return _quantise(hidden, hidden.shape[1] // 2, True, is_power_of_two)


def _quantise(
    x: Tensor, width: int, with_silu: bool, is_power_of_two: bool
) -> tuple[Tensor, Tensor]:
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows = x.shape[0]
    codes, scales = empty_rows(num_rows, width, x.device)
    if num_rows == 0 or width == 0:
        return codes, scales
    num_groups = scales.shape[1]
    groups = min(padded(num_groups), GROUPS_AT_ONCE)
    rows = 1 if num_rows < 256 else max(1, 8 // groups)
    quantise[(triton.cdiv(num_rows, rows), triton.cdiv(num_groups, groups))](
        x, codes.view(torch.uint8), scales, num_rows, width, x.stride(0), scales.stride(1),
        rows, groups, with_silu, is_power_of_two, has_native_fp8(x.device), num_warps=4,
    )  # fmt: skip
    return codes, scales
