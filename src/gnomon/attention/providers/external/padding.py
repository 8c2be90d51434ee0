"""The one adapter between our operands and kernels of fixed heads and widths, and back.

In:  queries [R, H, D_c] and [R, H, D_r], slot lists [R, W] with −1 behind, results of a library.
Out: queries [R, 64 or 128, D_c + D_r] with zero heads behind, lists int32 of a whole number of
     blocks with −1 behind; results cut to our heads, lse with −inf for a row without keys.
A zero head attends uniformly to the row's own keys: finite, and thrown away.
On a GPU both together are one launch (launches.py).
Conventions of lse: natural logarithm; FlashMLA says +inf where a row has no keys, we say −inf.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS = (64, 128)


def padded_heads(num_heads: int) -> int:
    """The least number of heads, of those that exist, that holds ``num_heads``."""
    return next(held for held in HEADS if num_heads <= held)


def pad_operands(
    q_latent: Tensor, q_rope: Tensor, slots: Tensor, multiple: int
) -> tuple[Tensor, Tensor]:
    """(query [R, padded heads, D_c + D_r], lists [R, W rounded up to ``multiple``, one at least]).

    Contiguous; heads from H on are zero, lists are int32 with −1 behind W. What stands so already
    is not copied.
    """
    num_rows, num_heads, rank = q_latent.shape
    heads, width = padded_heads(num_heads), slots.shape[1]
    held = max(1, -(-width // multiple)) * multiple
    joint = joint_query(q_latent, q_rope) if heads == num_heads else None
    is_held = slots.dtype == torch.int32 and width == held and slots.is_contiguous()
    if joint is not None and is_held:
        return joint, slots
    if q_latent.is_cuda:
        from gnomon.attention.providers.external.launches import packed_lists, packed_operands

        if joint is not None:
            return joint, packed_lists(slots, held)
        return packed_operands(q_latent, q_rope, heads, slots, held)
    query = joint
    if query is None:
        query = q_latent.new_zeros((num_rows, heads, rank + q_rope.shape[-1]))
        query[:, :num_heads, :rank] = q_latent
        query[:, :num_heads, rank:] = q_rope
    lists = slots.to(torch.int32)
    lists = lists.contiguous() if held == width else F.pad(lists, (0, held - width), value=-1)
    return query, lists


def joint_query(q_latent: Tensor, q_rope: Tensor) -> Tensor | None:
    """[R, H, D_c + D_r] where both are parts of one such tensor, side by side; else None."""
    num_rows, num_heads, rank = q_latent.shape
    width = rank + q_rope.shape[-1]
    strides = (num_heads * width, width, 1)
    if q_latent.stride() != strides or q_rope.stride() != strides:
        return None
    if q_rope.data_ptr() != q_latent.data_ptr() + rank * q_latent.element_size():
        return None
    return q_latent.as_strided((num_rows, num_heads, width), strides)


def empty_is_minus(lse: Tensor) -> Tensor:
    """The lse with −inf, whichever infinity a row without keys has; NaN stays."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def no_rows(q_latent: Tensor) -> tuple[Tensor, Tensor]:
    """The results of a call without rows, which the libraries refuse."""
    return torch.empty_like(q_latent), q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32)
