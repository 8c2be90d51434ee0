"""The one order of tokens: higher logit first, equal logits by the lower token id.

In:  float32 logits [M, V] without NaN (a NaN has no place in an order; the sampler refuses the
     row before it comes here).
Out: the first `width` token ids of each row in that order, exact even among ties.
Why not `topk` on the logits: its order among equal values is unspecified on CPU and GPU, and
equal logits are common once a model computes in bfloat16. The value and the id are packed into
one int64, so that all keys differ and every selection algorithm gives the same answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TOKEN_ID = 2**31


def order_keys(logits: Tensor) -> Tensor:
    """int64 [M, V]: a key per token, larger = earlier; `token_ids_of` reads the id back."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: −0.0 and 0.0 are one value
    ascending = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits).to(torch.int64)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (ascending << 32) - ids


def token_ids_of(keys: Tensor) -> Tensor:
    """The token ids that `order_keys` packed."""
    return -keys & 0xFFFF_FFFF


def leading_tokens(logits: Tensor, width: int) -> Tensor:
    """int64 [M, width]: the first `width` token ids of each row, best first."""
    keys = order_keys(logits)
    if width >= keys.shape[-1]:
        return token_ids_of(keys.sort(dim=-1, descending=True).values)
    return token_ids_of(keys.topk(width, dim=-1).values)


def ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [M]: the 1-based place of token_ids[m] in the order of row m."""
    chosen = logits.gather(-1, token_ids[:, None])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    earlier = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    return earlier.sum(-1) + 1
