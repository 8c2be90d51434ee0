"""Rotary angles of a shape, plain or stretched by YaRN.

In:  a `Shape`, a number of positions.   Out: cos and sin [positions, dr / 2] float32.
Maths: oracle_math §1.3 and §1.4, with cos and sin not scaled (mscale equals mscale_all_dim).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.shapes import Shape


def frequencies(shape: Shape) -> Tensor:
    """[dr / 2] float32: angle a position, of each pair of columns."""
    dim = shape.rope
    plain = 1.0 / (shape.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if shape.yarn is None:
        return plain
    factor, length, fast, slow = shape.yarn
    bounds = [
        dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(shape.theta))
        for turns in (fast, slow)
    ]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def rotary_table(
    shape: Shape, num_positions: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions 0 .. num_positions − 1."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies(shape)
    return angles.cos().to(device), angles.sin().to(device)
