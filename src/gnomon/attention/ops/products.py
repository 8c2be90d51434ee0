"""Matrix products with plain weights: by torch, or by kernels whose bits do not hang on the batch.

In:  rows and weights in one dtype, in which products are exact or summed as torch does.
Out: `Products`: what Operators.linear and Operators.multiply_heads call. `TORCH` is the default;
     dispatch.py binds a provider's own where a row's bits may hang on its own data alone.
Not here: FP8 weights and experts, which are operators of their own (spec/linear.py, spec/moe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Products:
    """``linear(x [M, K], weight [N, K], dtype or None)`` -> [M, N] of ``dtype``, None: x's.

    ``by_head(x [M, H, K], weight [H, K, N], is_packed)`` -> [M, H, N]; ``is_packed``: contiguous.
    ``is_fixed``: a row's bits hang on that row and the weight alone.
    """

    linear: Callable[[Tensor, Tensor, torch.dtype | None], Tensor]
    by_head: Callable[[Tensor, Tensor, bool], Tensor]
    is_fixed: bool = False


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Torch's product; another dtype than x's on a GPU only."""
    if dtype is None or dtype == x.dtype:
        return F.linear(x, weight)
    return torch.mm(x, weight.T, out_dtype=dtype)


def by_head(x: Tensor, weight: Tensor, is_packed: bool) -> Tensor:
    """Torch's product of every head, [H, M, K] by [H, K, N], seen with rows first."""
    heads = x.transpose(0, 1)
    if not is_packed:
        return torch.bmm(heads, weight).transpose(0, 1)
    out = x.new_empty((*x.shape[:2], weight.shape[2]))
    torch.bmm(heads, weight, out=out.transpose(0, 1))
    return out


TORCH = Products(linear, by_head)
