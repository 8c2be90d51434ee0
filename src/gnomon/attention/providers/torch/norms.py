"""Norms and rotation in few torch calls; half dtypes are computed in fp32 and rounded once.

In:  x of any float dtype. Out: the same shape and dtype. Every row's bits depend on that row alone:
only row-wise reductions and element-wise products.
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
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    scaled = (wide * scale).mul_(weight)
    return scaled if wide is x else scaled.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x − mean) * (var + eps)^-1/2 * weight + bias over the last dim."""
    wide = widen(x)
    normed = F.layer_norm(wide, wide.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps)
    return normed.to(x.dtype)


def rope(x: Tensor, rows: RopeRows) -> Tensor:
    """Rotate the first ``rows.dim`` columns of x [R, ..., D]."""
    dim = rows.dim
    if not dim:
        return x.clone()
    part = widen(x if x.shape[-1] == dim else x[..., :dim])
    middle = (1,) * (x.dim() - 2)
    if rows.is_interleaved:
        # Neighbouring columns are one complex number: products and sums as below, one pass.
        if part.storage_offset() % 2 or any(stride % 2 for stride in part.stride()[:-1]):
            part = part.contiguous()  # a slice of rows of odd width holds no whole pairs
        pairs = part.view(*part.shape[:-1], dim // 2, 2)
        turn = (rows.pair_turns() if rows.turn is None else rows.turn).view(-1, *middle, dim // 2)
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
    else:
        cos, sin = (t.view(-1, *middle, dim) for t in (rows.cos, rows.sin))
        turned = (part * cos).add_(part.roll(dim // 2, -1) * sin)
    if turned.dtype != x.dtype:
        turned = turned.to(x.dtype)
    return turned if x.shape[-1] == dim else torch.cat((turned, x[..., dim:]), -1)
