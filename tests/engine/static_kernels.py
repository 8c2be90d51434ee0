"""Kernels in plain torch that a CUDA graph can capture: static shapes, nothing read by the host.

In:  as spec.SPECS says. Out: the same numbers as the torch provider's kernels but for rounding;
slow, for every row does the work of the widest. Those that prefill alone needs are the torch
provider's own. `StaticRecorder` replays a captured step's work without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import TopK
from gnomon.attention.providers import torch as torch_provider


def sparse_mla(
    q_latent: Tensor, q_rope: Tensor, pool: PagedPool, slots: Tensor, count: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    query = torch.cat((q_latent, q_rope), -1).to(wide) * scale
    entries = pool.layout.gather(pool, slots).to(wide)
    logits = torch.bmm(query, entries.mT)
    is_behind = torch.arange(slots.shape[1], device=slots.device) >= count[:, None]
    logits = logits.masked_fill(is_behind[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    out = torch.bmm(weights, entries[..., : q_latent.shape[-1]])
    return out.to(q_latent.dtype), lse


def index_scores_paged(
    q: Tensor, weights: Tensor, pool: PagedPool, pages: Tensor, count: Tensor, scale: float
) -> Tensor:
    wide, size = torch.promote_types(q.dtype, torch.float32), pool.page_size
    inside = torch.arange(size, device=pages.device)
    slots = (pages.long()[:, :, None] * size + inside).flatten(1)
    keys = pool.layout.gather(pool, slots).to(wide)
    heads = torch.bmm(q.to(wide), keys.mT).relu()
    scores = torch.bmm(weights.to(wide)[:, None] * scale, heads)[:, 0]
    is_behind = torch.arange(slots.shape[1], device=pages.device) >= count[:, None]
    return scores.masked_fill(is_behind, -torch.inf)


def topk(scores: Tensor, count: Tensor, k: int, want_margin: bool = False) -> TopK:
    has_nan = scores.isnan().any(1)
    clean = scores.masked_fill(scores.isnan(), -torch.inf)
    if clean.shape[1] < k + 1:
        clean = F.pad(clean, (0, k + 1 - clean.shape[1]), value=-torch.inf)
    values, order = clean.sort(dim=1, descending=True, stable=True)
    behind = torch.iinfo(torch.int32).max
    ids = order[:, :k].to(torch.int32)
    ids = ids.masked_fill(ids >= count[:, None], behind).sort(dim=1).values
    margin = None
    if want_margin:
        margin = (values[:, k - 1] - values[:, k]).masked_fill(count <= k, torch.inf)
    return TopK(ids.masked_fill(ids == behind, -1), count.clamp_max(k), margin, has_nan)


def moe(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(x.shape, dtype=wide)
    for expert in range(gate_up.shape[0]):
        share = expert_weights.masked_fill(expert_ids != expert, 0).sum(-1, keepdim=True)
        gate, up = F.linear(x, gate_up[expert]).chunk(2, -1)
        out = out + F.linear(F.silu(gate) * up, down[expert]).to(wide) * share.to(wide)
    return out.to(x.dtype)


def static_operators() -> Operators:
    """All operators; those of a decode step can be captured."""
    return Operators(
        {
            **torch_provider.PROVIDER.kernels,
            "sparse_mla": sparse_mla,
            "index_scores_paged": index_scores_paged,
            "topk": topk,
            "moe": moe,
        }
    )


class StaticRecorder:
    """A recorder without CUDA: a replay does the recorded work again, into the same outputs."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        outputs = work()

        def replay() -> None:
            for kept, new in zip(outputs, work(), strict=True):
                kept.copy_(new)

        return replay, outputs
