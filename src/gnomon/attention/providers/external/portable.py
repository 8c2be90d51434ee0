"""FP8 products of shapes that a library lacks: triton's on a GPU, torch's on a CPU.

In:  what linear_fp8 and moe_fp8 take (spec/linear.py). Out: as there.
Why triton: torch makes numbers of the whole weight at every call, which a GPU has no room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.providers.torch import linear as plain

Codes = tuple[Tensor, Tensor]


def linear_fp8(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """[M, N] of ``dtype``; x_codes [M, K], codes [N, K]."""
    if not codes.is_cuda:
        return plain.linear_fp8(x_codes, x_scales, codes, scales, dtype)
    from gnomon.attention.providers.triton import linear

    return linear.linear_fp8(x_codes, x_scales, codes, scales, dtype)


def moe_fp8(
    x: Codes,
    choices: Codes,
    gate_up: Codes,
    down: Codes,
    is_power_of_two: bool,
    dtype: torch.dtype,
) -> Tensor:
    """[R, D] of ``dtype``; ``choices``: expert ids [R, k] and their weights."""
    if not x[0].is_cuda:
        return plain.moe_fp8(x, *choices, gate_up, down, is_power_of_two, dtype)
    from gnomon.attention.providers.triton import moe

    result: Tensor = moe.moe_fp8(x, *choices, gate_up, down, is_power_of_two, dtype)
    return result
