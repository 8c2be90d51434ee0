"""Products with block FP8 weights in plain torch: decode, then multiply. The truth of a CPU run.

In:  rows and weights as codes e4m3 and scales (attention/block_fp8.py).
Out: codes and scales of rows; products in the dtype that is asked for, from fp32 (fp64) sums.
`*_fixed`: rows are padded to a multiple of 16, because a matmul of fewer takes another path and
other bits (environment.md §2); then, in fp32, a row's bits depend on that row alone.
Not fast: every call decodes the whole weight. A CPU that wants speed dequantises at loading.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.attention.block_fp8 import GROUP, dequantised, dequantised_rows, num_groups
from gnomon.attention.layouts.float8 import (
    E4M3_MAX,
    MIN_INDEX_AMAX,
    ceil_power_of_two,
    encode_e4m3,
    finite_amax,
)

FIXED_ROWS = 16
Codes = tuple[Tensor, Tensor]


def quantise_rows(x: Tensor, is_power_of_two: bool) -> Codes:
    """Codes [M, K] e4m3 and scales [M, ceil(K / 128)] of x [M, K]."""
    num_rows, width = x.shape
    shape = num_rows, num_groups(width), GROUP
    padded = F.pad(x.to(torch.float32), (0, -width % GROUP)).view(shape)
    scales = finite_amax(padded).clamp_min(MIN_INDEX_AMAX) / E4M3_MAX
    if is_power_of_two:
        scales = ceil_power_of_two(scales)
    codes = encode_e4m3(padded, scales).flatten(1)[:, :width].contiguous()
    return codes.view(torch.float8_e4m3fn), scales


def silu_quantise(hidden: Tensor, is_power_of_two: bool) -> Codes:
    """The same of silu(gate) · up, formed in fp32 (fp64), hidden [M, 2 I]."""
    gate, up = hidden.to(_wide(hidden.dtype)).chunk(2, dim=-1)
    return quantise_rows(F.silu(gate) * up, is_power_of_two)


def linear_fp8(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """[M, N] of ``dtype``; x_codes [M, K], codes [N, K]."""
    wide = _wide(dtype)
    x = dequantised_rows(x_codes, x_scales, wide)
    return F.linear(x, dequantised(codes, scales, wide)).to(dtype)


def linear_fp8_fixed(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """The same; in fp32 a row's bits depend on that row alone."""
    wide = _wide(dtype)
    x = dequantised_rows(x_codes, x_scales, wide)
    return _fixed(x, dequantised(codes, scales, wide)).to(dtype)


def moe_fp8(
    x: Codes,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Codes,
    down: Codes,
    is_power_of_two: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Σ_j weight · down_e(q(silu(gate_e x) · up_e x)), one expert after the other, ascending.

    In fp32 a row's bits depend on that row alone.
    """
    wide = _wide(dtype)
    rows_x = dequantised_rows(*x, wide)
    out = rows_x.new_zeros(rows_x.shape[0], down[0].shape[1])
    for expert, rows, places in _named(expert_ids):
        hidden = _fixed(rows_x[rows], dequantised(gate_up[0][expert], gate_up[1][expert], wide))
        gate, up = hidden.chunk(2, dim=-1)
        active = dequantised_rows(*quantise_rows(F.silu(gate) * up, is_power_of_two), wide)
        product = _fixed(active, dequantised(down[0][expert], down[1][expert], wide))
        share = expert_weights[rows, places].to(wide)
        out.index_add_(0, rows, product * share[:, None])
    return out.to(dtype)


def _named(expert_ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, rows, places) of every expert that a row names."""
    named: Tensor = torch.unique(expert_ids)
    for expert in named[named >= 0].tolist():
        rows, places = (expert_ids == expert).nonzero(as_tuple=True)
        yield expert, rows, places


def _fixed(x: Tensor, weight: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % FIXED_ROWS))
    return F.linear(padded, weight)[: x.shape[0]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
