"""Reference products with block FP8 weights: float64 sums over exactly decoded numbers.

In:  rows and weights as codes e4m3 (or their values, in float64) and scales; oracle_math.md §4.1.
Out: codes and scales of rows; products [M, N] and mixtures [R, D] in the dtype that is asked for.
Quantisation is defined in float32: scale = max(amax, 1e-4) / 448, raised to a power of two if
asked; code = value / scale to nearest even. A value that is not finite becomes NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.layouts.float8 import (
    E4M3_MAX,
    MIN_INDEX_AMAX,
    ceil_power_of_two,
    encode_e4m3,
    finite_amax,
)

GROUP = 128


def quantise_rows(x: Tensor, is_power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales [M, ceil(K / 128)] of x [M, K], group by group."""
    values = x.to(torch.float32)
    codes, scales = [], []
    for start in range(0, x.shape[1], GROUP):
        part = values[:, start : start + GROUP]
        scale = finite_amax(part).clamp_min(MIN_INDEX_AMAX) / E4M3_MAX
        if is_power_of_two:
            scale = ceil_power_of_two(scale)
        codes.append(encode_e4m3(part, scale))
        scales.append(scale)
    return torch.cat(codes, dim=1).view(torch.float8_e4m3fn), torch.stack(scales, dim=1)


def silu_quantise(hidden: Tensor, is_power_of_two: bool) -> tuple[Tensor, Tensor]:
    """The same of silu(gate) · up, hidden [M, 2 I] with the gate's columns first."""
    return quantise_rows(_activated(hidden.double()), is_power_of_two)


def linear_fp8(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """[M, N]: block by block, Σ_k code · code, times the row's and the block's scale."""
    x, weight = x_codes.double(), codes.double()
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    for n in range(0, weight.shape[0], GROUP):
        for number, k in enumerate(range(0, weight.shape[1], GROUP)):
            part = x[:, k : k + GROUP] @ weight[n : n + GROUP, k : k + GROUP].T
            scale = x_scales[:, number].double() * scales[n // GROUP, number].double()
            out[:, n : n + GROUP] += part * scale[:, None]
    return out.to(dtype)


def moe_fp8(
    x: tuple[Tensor, Tensor],
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    is_power_of_two: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Σ_j weight · down_e(q(silu(gate_e x) · up_e x)), q quantises and decodes again."""
    wide = torch.float64
    out = torch.zeros(x[0].shape[0], down[0].shape[1], dtype=wide, device=x[0].device)
    for row, experts in enumerate(expert_ids.tolist()):
        one = x[0][row : row + 1], x[1][row : row + 1]
        for place, expert in enumerate(experts):
            if expert < 0:
                continue
            hidden = linear_fp8(*one, gate_up[0][expert], gate_up[1][expert], wide)
            active = silu_quantise(hidden, is_power_of_two)
            product = linear_fp8(*active, down[0][expert], down[1][expert], wide)
            out[row] += expert_weights[row, place].double() * product[0]
    return out.to(dtype)


def _activated(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up
