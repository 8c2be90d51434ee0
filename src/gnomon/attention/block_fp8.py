"""Block FP8 as operators take it: quantised rows and quantised weights.

In:  codes float8_e4m3fn and float32 scales. A row has a scale per 128 columns, a weight one per
     block of 128 × 128; blocks at the edges are cut off, not padded.
Out: frozen values. A number is code × scale of its group or block.
Maths: oracle_math.md §2.3, §4.1. Not here: making them (operators quantise_rows, silu_quantise;
models/quantised.py), formats with other block sizes, which are dequantised at loading.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128


def num_groups(width: int) -> int:
    """Groups of 128 that ``width`` columns (or rows) start."""
    return -(-width // GROUP)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Rows:
    """Rows [M, K] in FP8. ``dtype``: of the values before, and of what is computed from them."""

    codes: Tensor  # [M, K] float8_e4m3fn
    scales: Tensor  # [M, ceil(K / 128)] float32, any strides
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class BlockFp8Weight:
    """A matrix [N, K], or one of each expert [E, N, K], in FP8.

    ``is_power_of_two``: scales are powers of two (scale_fmt ue8m0), those of activations too.
    """

    codes: Tensor  # [..., N, K] float8_e4m3fn
    scales: Tensor  # [..., ceil(N / 128), ceil(K / 128)] float32
    is_power_of_two: bool

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Where both tensors are."""
        return self.codes.device


def dequantised(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [..., N, K] of a weight's codes and scales, multiplied in `dtype` (fp32 or wider)."""
    rows, columns = codes.shape[-2:]
    of_rows = scales.to(dtype).repeat_interleave(GROUP, dim=-2)[..., :rows, :]
    return codes.to(dtype).mul_(of_rows.repeat_interleave(GROUP, dim=-1)[..., :columns])


def dequantised_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [M, K] of rows' codes and scales, multiplied in `dtype` (fp32 or wider)."""
    wide = scales.to(dtype).repeat_interleave(GROUP, dim=-1)[..., : codes.shape[-1]]
    return codes.to(dtype).mul_(wide)
