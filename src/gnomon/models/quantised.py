"""Block FP8 weights: codes and scales to values and back.

In:  codes float8_e4m3fn [..., R, C] and scales [..., ceil(R / rows), ceil(C / columns)]; or values.
Out: values = code × scale of its block, where blocks at the edges are cut off, not padded; or codes
     (rounded to nearest even) and scales = largest magnitude / 448, raised to a power of two where
     the format says so.
Maths: oracle_math §2.3, §4.1. transformers' own dequantiser derives the block from the shapes and
     is wrong for edge blocks (§3.6); it is no oracle here.
Not here: FP8 arithmetic, activations, cache formats (attention/layouts).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.models.config import BlockFp8

E4M3_MAX = 448.0
SCALE_SUFFIX = "_scale_inv"  # behind the weight's whole name: X.weight_scale_inv


def scale_shape(shape: tuple[int, ...], block: BlockFp8) -> tuple[int, ...]:
    """Shape of the scales of a tensor [..., R, C]: one per started block."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // block.block_rows), -(-columns // block.block_columns))


def dequantise_blocks(
    codes: Tensor, scales: Tensor, block: BlockFp8, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values [..., R, C] in `dtype` (float32 or float64: one product, rounded once)."""
    return codes.to(dtype) * _spread(scales.to(dtype), codes.shape, block)


def quantise_blocks(values: Tensor, block: BlockFp8) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales of values [..., R, C]. A block of zeros gets the scale 1."""
    values = values.to(torch.float32)
    rows, columns = values.shape[-2:]
    pad = (0, -columns % block.block_columns, 0, -rows % block.block_rows)
    grid = scale_shape(values.shape, block)
    tiles = torch.nn.functional.pad(values.abs(), pad).view(
        *grid[:-1], block.block_rows, grid[-1], block.block_columns
    )
    scales = tiles.amax(dim=(-3, -1)) / E4M3_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    if block.has_power_of_two_scales:
        scales = next_power_of_two(scales)
    scaled = values / _spread(scales, values.shape, block)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def next_power_of_two(values: Tensor) -> Tensor:
    """Round positive normal float32 values up to a power of two, by their bits and so exactly."""
    bits = values.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent << 23).view(torch.float32)


def _spread(scales: Tensor, shape: torch.Size, block: BlockFp8) -> Tensor:
    """The scale of each element: blocks repeated, then cut at the edges."""
    rows = scales.repeat_interleave(block.block_rows, dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block.block_columns, dim=-1)[..., : shape[-1]]
