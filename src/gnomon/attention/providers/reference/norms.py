"""Reference norms, rotation and Hadamard transform: formulas in float64, rounded once at the end.

In:  x of any float dtype. Out: the same shape and dtype. Maths: oracle_math.md §1.1, §1.3, §1.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.ops.values import RopeRows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dim: x * (mean(x²) + eps)^-1/2 * weight."""
    wide = x.double()
    mean_square = (wide * wide).sum(-1, keepdim=True) / x.shape[-1]
    return (wide / (mean_square + eps).sqrt() * weight.double()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x − mean) * (var + eps)^-1/2 * weight + bias; var is the mean squared deviation."""
    wide = x.double()
    mean = wide.sum(-1, keepdim=True) / x.shape[-1]
    deviation = wide - mean
    variance = (deviation * deviation).sum(-1, keepdim=True) / x.shape[-1]
    normed = deviation / (variance + eps).sqrt()
    return (normed * weight.double() + bias.double()).to(x.dtype)


def rope(x: Tensor, rows: RopeRows) -> Tensor:
    """Rotate column pairs of x [R, ..., D], one pair after the other; columns from dim on pass."""
    cos, sin = rows.cos.double(), rows.sin.double()
    out = x.double().clone()
    middle = (1,) * (x.dim() - 2)
    for column in range(rows.dim):
        if rows.is_interleaved:
            partner = column + 1 if column % 2 == 0 else column - 1
        else:
            partner = (column + rows.dim // 2) % rows.dim
        c = cos[:, column].view(-1, *middle)
        s = sin[:, column].view(-1, *middle)
        out[..., column] = x[..., column].double() * c + x[..., partner].double() * s
    return out.to(x.dtype)


def hadamard_matrix(dim: int) -> Tensor:
    """Sylvester's matrix of ±1, entry (i, j) = (−1)^popcount(i & j); symmetric, float64."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    return torch.tensor(signs, dtype=torch.float64)


def hadamard(x: Tensor) -> Tensor:
    """Returns x @ H * dim^-1/2 over the last dim, a power of two. Its own inverse."""
    dim = x.shape[-1]
    turned: Tensor = x.double() @ hadamard_matrix(dim).to(x.device) * dim**-0.5
    return turned.to(x.dtype)
