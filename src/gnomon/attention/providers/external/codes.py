"""e4m3 codes and scales of values that hold them exactly: what FP8 score kernels want.

In:  values [..., D] that were rounded through e4m3 with a power-of-two scale (the index_k layouts).
Out: codes e4m3 [..., D], scales fp32 [...]; for queries the scale is folded into the head weights.
The scale may come out as half of the one that was used, with codes doubled: the same numbers.
NaN: a scale is NaN where a value is not finite, so that every score made of it is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.layouts.float8 import E4M3_MAX, index_key_scale


def key_codes(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(codes e4m3 [N, D], scales fp32 [N]) of rounded keys."""
    if keys.is_cuda:
        from gnomon.attention.providers.external.launches import codes_of_rows

        codes, scales = codes_of_rows(keys[:, None])
        return codes[:, 0], scales[:, 0]
    return _codes(keys)


def query_codes(q: Tensor, weights: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(codes e4m3 [M, Hi, Di], weights · scale · scale of the codes, fp32 [M, Hi])."""
    if q.is_cuda:
        from gnomon.attention.providers.external.launches import codes_of_rows

        return codes_of_rows(q, weights, scale)
    codes, scales = _codes(q)
    return codes, weights.to(torch.float32) * scale * scales


def _codes(keys: Tensor) -> tuple[Tensor, Tensor]:
    if keys.dtype == torch.float16:  # cannot hold the reciprocals of small scales
        keys = keys.to(torch.float32)
    largest = keys.abs().amax(dim=-1).to(torch.float32)
    scales = index_key_scale(largest.nan_to_num(0.0, 0.0, 0.0))
    # Multiplying by a power of two is exact in every float dtype that holds the keys.
    scaled = keys * scales.reciprocal().to(keys.dtype)[..., None]
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.contiguous(), scales + (largest - largest)  # NaN where largest is not finite
