"""Latent attention of B sequences of T tokens: dense, or over the keys that an indexer chose.

In:  a layer's `Projected` rows [B * T, ...], its kv_b, a selection [B, T, K] or None (dense).
Out: [B * T, H * dv].
Maths: oracle_math §1.2. Two sparse forms, equal but for rounding: `masked` expands keys and values
and lets a mask choose (fast while T is short; also the plain form that tests trust), `gathered`
reads K latents a row and runs absorbed (its cost does not grow with T).
A selection is ascending in nothing and may name future positions where a row sees fewer than K
keys; those are masked here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training.blocks import Projected
from training.shapes import Shape

MASKED_UP_TO = 1024  # tokens a sequence


def split_heads(kv_b: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """W_UK [H, dn, D_c] and W_UV [H, dv, D_c]: views of kv_b."""
    both = kv_b.view(shape.heads, shape.nope + shape.value, shape.kv_rank)
    return both[:, : shape.nope], both[:, shape.nope :]


def expand_keys(rows: Projected, kv_b: Tensor, batch: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Keys [B, H, T, dn + dr] and values [B, H, T, dv]."""
    up = F.linear(rows.latent, kv_b.to(rows.latent.dtype))
    up = up.view(batch, -1, shape.heads, shape.nope + shape.value)
    rope = rows.k_rope.view(batch, -1, 1, shape.rope).expand(-1, -1, shape.heads, -1)
    key = torch.cat((up[..., : shape.nope], rope), dim=-1)
    return key.transpose(1, 2), up[..., shape.nope :].transpose(1, 2)


def queries(rows: Projected, batch: int, shape: Shape) -> Tensor:
    """[B, H, T, dn + dr]."""
    q = torch.cat((rows.q_nope, rows.q_rope), dim=-1)
    return q.view(batch, -1, shape.heads, shape.nope + shape.rope).transpose(1, 2)


def attend(
    rows: Projected, kv_b: Tensor, batch: int, selection: Tensor | None, shape: Shape
) -> Tensor:
    """[B * T, H * dv]."""
    if selection is not None and selection.shape[1] > MASKED_UP_TO:
        return _gathered(rows, kv_b, selection, shape)
    query, (key, value) = queries(rows, batch, shape), expand_keys(rows, kv_b, batch, shape)
    short = query.shape[-1] - shape.value
    if query.is_cuda and short > 0:
        value = F.pad(value, (0, short))  # the fast kernels want keys and values of one width
    mask = None if selection is None else visible_mask(selection)[:, None]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=shape.softmax_scale
    )
    return out[..., : shape.value].transpose(1, 2).reshape(len(rows.latent), -1)


def visible_mask(selection: Tensor) -> Tensor:
    """[B, T, T] bool: what each row attends; future positions are not."""
    batch, length, _ = selection.shape
    mask = torch.zeros(batch, length, length, dtype=torch.bool, device=selection.device)
    return mask.scatter_(2, selection, value=True).tril_()


class _Gather(torch.autograd.Function):
    """Rows of a table; the gradient is summed in float32 whatever the table's dtype."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows, ctx.dtype = len(table), table.dtype
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.num_rows, grad.shape[1], device=grad.device)
        return total.index_add_(0, index, grad.float()).to(ctx.dtype), None


def _gathered(rows: Projected, kv_b: Tensor, selection: Tensor, shape: Shape) -> Tensor:
    batch, length, width = selection.shape
    dtype = rows.latent.dtype
    up_key, up_value = split_heads(kv_b.to(dtype), shape)
    start = torch.arange(batch, device=selection.device).view(-1, 1, 1) * length
    table = torch.cat((rows.latent, rows.k_rope), dim=-1)
    keys = _Gather.apply(table, (selection + start).flatten())
    keys = keys.view(batch * length, width, table.shape[1])
    # [H, N, dn] @ [H, dn, D_c]
    absorbed = torch.bmm(rows.q_nope.transpose(0, 1), up_key).transpose(0, 1)
    query = torch.cat((absorbed, rows.q_rope), dim=-1)
    logits = torch.bmm(query, keys.transpose(1, 2)).float() * shape.softmax_scale
    now = torch.arange(length, device=selection.device).view(1, -1, 1)
    hidden = (selection > now).view(batch * length, 1, width)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).to(dtype)
    latent = torch.bmm(weights, keys[..., : shape.kv_rank])  # [N, H, D_c]
    value = torch.bmm(latent.transpose(0, 1), up_value.transpose(1, 2))  # [H, N, dv]
    return value.transpose(0, 1).reshape(batch * length, -1)
