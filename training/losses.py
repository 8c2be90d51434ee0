"""What is minimised: weighted next-token loss, the same for MTP, and the indexer's divergence.

In:  hidden rows, targets and their weights; queries, keys and index scores of some rows.
Out: scalars. `next_token` is compiled with the token-wise blocks.
Maths: the indexer is taught to put its softmax where the heads, averaged, look: KL(p || softmax I)
over all that a row sees, p without gradient (DeepSeek-V3.2's dense warm-up). We keep this teacher
in the sparse stage too, on a sample of rows: with few chosen keys a loss over the chosen alone
could never find a key that was missed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from training.attention import expand_keys, queries
from training.blocks import Projected, linear
from training.parameters import Parameters
from training.selection import scores_of
from training.shapes import Shape


def next_token(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weighted mean loss; and whether each row's best guess is right [N]."""
    logits = linear(hidden, head, dtype).float()
    loss = F.cross_entropy(logits, target, reduction="none")
    total = (loss * weight).sum() / weight.sum().clamp(min=1.0)
    return total, logits.detach().argmax(-1) == target


def pick_rows(weight: Tensor, count: int) -> Tensor:
    """Rows [B, count] to teach the indexer on: at random, those with an answer rather."""
    chance = torch.rand_like(weight) + 0.5 * (weight >= 1.0)
    return chance.topk(min(count, weight.shape[1]), dim=1).indices


def index_divergence(
    own: Projected, source: Projected, kv_b: Tensor, picked: Tensor, shape: Shape
) -> Tensor:
    """KL of one layer's attention (`own`) from the scores of the indexer it listens to."""
    batch, count = picked.shape
    length = len(own.latent) // batch
    is_future = torch.arange(length, device=picked.device)[None, None] > picked[:, :, None]
    with torch.no_grad():
        key, _ = expand_keys(own, kv_b, batch, shape)
        at = picked[:, None, :, None].expand(-1, shape.heads, -1, key.shape[-1])
        logits = queries(own, batch, shape).gather(2, at) @ key.transpose(2, 3)
        logits = logits.float() * shape.softmax_scale
        teacher = logits.masked_fill_(is_future[:, None], -torch.inf).softmax(-1).mean(1)
    flat = (picked + torch.arange(batch, device=picked.device)[:, None] * length).flatten()
    query = source.index_q.index_select(0, flat).view(batch, count, *source.index_q.shape[1:])
    weight = source.index_w.index_select(0, flat).view(batch, count, -1)
    scores = scores_of(query, weight, source.index_k.view(batch, length, -1), shape)
    guess = scores.masked_fill(is_future, -torch.inf).log_softmax(-1).masked_fill(is_future, 0.0)
    return (torch.xlogy(teacher, teacher) - teacher * guess).sum() / (batch * count)


def expert_loads_to_bias(params: Parameters, loads: dict[int, Tensor], step: float) -> None:
    """Move each router's bias towards even loads (oracle_math §1.7: no auxiliary loss)."""
    for layer, load in loads.items():
        bias = params[f"layers.{layer}.router.bias"]
        bias.add_(torch.sign(load.mean() - load), alpha=step)
        bias.sub_(bias.mean())
