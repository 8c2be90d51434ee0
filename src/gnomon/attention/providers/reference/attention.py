"""Reference attention: one row after the other, softmax written out, in float64.

In:  queries, a pool with slots or plain keys and values. Out: (out, lse): out in the query's dtype,
lse natural log in fp32 (fp64 for fp64 queries); an empty row gives 0 and −inf.
Maths: oracle_math.md §1.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.layouts.base import PagedPool


def sparse_mla(
    q_latent: Tensor,
    q_rope: Tensor,
    pool: PagedPool,
    slots: Tensor,
    count: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Row r attends the first count[r] of its slots [R, W]; values are the latents themselves."""
    rank = q_latent.shape[-1]
    out = torch.zeros_like(q_latent)
    lse = _empty_lse(q_latent)
    for row, length in enumerate(count.tolist()):
        entries = pool.layout.gather(pool, slots[row, :length].long()).double()
        query = torch.cat((q_latent[row], q_rope[row]), dim=-1).double()
        out[row], lse[row] = _attend(query, entries, entries[:, :rank], scale)
    return out, lse


def dense_mha(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Row m, head h attends the first visible[m] of k [N, H, D], v [N, H, Dv]."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = _empty_lse(q)
    for row, length in enumerate(visible.tolist()):
        for head in range(q.shape[1]):
            keys, values = k[:length, head].double(), v[:length, head].double()
            query = q[row, head, None].double()
            one_out, one_lse = _attend(query, keys, values, scale)
            out[row, head], lse[row, head] = one_out[0], one_lse[0]
    return out, lse


def lse_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Weights e^lse, computed against the larger lse; both empty gives 0 and −inf."""
    a, b = lse_a.double(), lse_b.double()
    largest = torch.maximum(a, b)
    is_empty = largest == -torch.inf
    anchor = torch.where(is_empty, torch.zeros_like(largest), largest)
    weight_a, weight_b = (a - anchor).exp(), (b - anchor).exp()
    total = weight_a + weight_b
    share = torch.where(is_empty, torch.ones_like(total), total)[..., None]
    out = (out_a.double() * weight_a[..., None] + out_b.double() * weight_b[..., None]) / share
    lse = torch.where(is_empty, largest, anchor + total.log())
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query [H, D], keys [n, D], values [n, Dv] → out [H, Dv], lse [H]; all float64."""
    if keys.shape[0] == 0:
        return values.new_zeros(query.shape[0], values.shape[-1]), query.new_full(
            (query.shape[0],), -torch.inf
        )
    logits = scale * (query @ keys.T)
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ values / total, (largest + total.log())[:, 0]


def _empty_lse(query: Tensor) -> Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.full(query.shape[:2], -torch.inf, dtype=dtype, device=query.device)
