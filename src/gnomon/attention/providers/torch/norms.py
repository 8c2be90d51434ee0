"""Norms and rotation in few torch calls; half dtypes are computed in fp32 and rounded once.

In:  x of any float dtype. Out: the same shape and dtype. Every row's bits depend on that row alone:
only row-wise reductions and element-wise products, no fused multiply-add.
Maths: oracle_math.md §1.1, §1.3, §1.5.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.attention.ops.values import RopeRows

HALF_DTYPES = (torch.bfloat16, torch.float16)


def widen(x: Tensor) -> Tensor:
    """Returns x in the dtype that arithmetic happens in: fp32 for half dtypes, else its own."""
    return x.float() if x.dtype in HALF_DTYPES else x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dim: x * (mean(x²) + eps)^-1/2 * weight."""
    wide = widen(x)
    scaled = F.rms_norm(wide, wide.shape[-1:], weight.to(wide.dtype), eps)
    return scaled.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x − mean) * (var + eps)^-1/2 * weight + bias over the last dim."""
    wide = widen(x)
    normed = F.layer_norm(wide, wide.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps)
    return normed.to(x.dtype)


def rope(x: Tensor, rows: RopeRows) -> Tensor:
    """Rotate the first ``rows.dim`` columns of x [R, ..., D]."""
    dim, cos, sin = rows.dim, rows.cos, rows.sin
    if x.dim() > 2:
        shape = (x.shape[0], *(1,) * (x.dim() - 2), dim)
        cos, sin = cos.view(shape), sin.view(shape)
    part = x if x.shape[-1] == dim else x[..., :dim]
    if rows.is_interleaved:
        partner = part.view(*part.shape[:-1], dim // 2, 2).flip(-1).flatten(-2)
    else:
        partner = part.roll(dim // 2, -1)
    # Half x times fp32 cosines is fp32: rotated there, rounded once below.
    turned = (part * cos).add_(partner * sin)
    if turned.dtype != x.dtype:
        turned = turned.to(x.dtype)
    return turned if part is x else torch.cat((turned, x[..., dim:]), -1)
