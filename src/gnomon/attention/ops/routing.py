"""Which experts each row goes to, and with what weight.

In:  router logits [R, E], the correction bias [E], the rule.
Out: `Routing`: ids, weights, and how near the next choice was.
Maths: oracle_math.md §1.7 (DeepSeek-V3's auxiliary-loss-free routing): sigmoid scores, a bias that
takes part in the choice only, group-limited selection, weights normalised over the chosen experts
and scaled. Not here: the router's product, the experts (operators moe, moe_fp8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router chooses: everything but its weights.

    ``shared_expert``: the number of an expert that every row goes to besides, with weight 1.
    """

    top_k: int
    num_groups: int
    top_groups: int
    is_normalised: bool
    scale: float
    shared_expert: int | None = None

    @property
    def width(self) -> int:
        """Places of a row: chosen experts, then the shared one."""
        return self.top_k + (self.shared_expert is not None)


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's choice for every row; a padding row has expert −1 everywhere."""

    expert_ids: Tensor  # [R, rule.width] int64
    weights: Tensor  # [R, rule.width] in the logits' dtype
    margin: Tensor | None  # [R]: how far the nearest expert not chosen (or group) is


def route(
    logits: Tensor, bias: Tensor, request: Tensor | None, rule: RouterRule, want_margin: bool
) -> Routing:
    """Choose ``top_k`` experts for every row; ``request`` [R]: negative in padding rows.

    A group's score is the sum of its two best biased scores; experts outside the best
    ``top_groups`` groups cannot be chosen. With one group that step is the identity.
    """
    scores = logits.sigmoid()
    choice = scores + bias
    num_rows, num_experts = choice.shape
    margin = choice.new_full((num_rows,), torch.inf) if want_margin else None
    if rule.top_groups < rule.num_groups:
        grouped = choice.view(num_rows, rule.num_groups, num_experts // rule.num_groups)
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        if margin is not None:
            margin = torch.minimum(margin, _edge(group_score, rule.top_groups))
        kept = group_score.topk(rule.top_groups, dim=-1).indices
        banned = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, kept, value=False)
        choice = grouped.masked_fill(banned[:, :, None], -torch.inf).view(num_rows, num_experts)
    if margin is not None:
        margin = torch.minimum(margin, _edge(choice, rule.top_k))
    ids = choice.topk(rule.top_k, dim=-1).indices
    if request is not None:
        ids = ids.masked_fill((request < 0)[:, None], -1)
    weights = expert_weights(logits, ids, rule)
    return Routing(*with_shared(ids, weights, request, rule), margin)


def with_shared(
    expert_ids: Tensor, weights: Tensor, request: Tensor | None, rule: RouterRule
) -> tuple[Tensor, Tensor]:
    """Ids and weights [R, k] with the shared expert behind them, where the rule has one."""
    if rule.shared_expert is None:
        return expert_ids, weights
    shared = expert_ids.new_full((expert_ids.shape[0], 1), rule.shared_expert)
    if request is not None:
        shared = shared.masked_fill((request < 0)[:, None], -1)
    return torch.cat((expert_ids, shared), 1), F.pad(weights, (0, 1), value=1.0)


def expert_weights(logits: Tensor, expert_ids: Tensor, rule: RouterRule) -> Tensor:
    """Weights [R, k] of experts chosen by whomever; an id of −1 has some weight, of no effect."""
    weights = logits.sigmoid().gather(1, expert_ids.clamp(min=0))
    if rule.is_normalised:
        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
    return weights.mul_(rule.scale)


def _edge(scores: Tensor, k: int) -> Tensor:
    """Gap between the k-th and the next best score of a row; +inf where all are taken."""
    if k >= scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], torch.inf)
    best = scores.topk(k + 1, dim=-1).values
    return (best[..., k - 1] - best[..., k]).nan_to_num(nan=torch.inf)
