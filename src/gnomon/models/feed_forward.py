"""Feed-forward blocks: the dense SwiGLU of the first layers, and the mixture of experts.

In:  hidden states [R, D] after the block's norm, the layer's weights, the bound operators.
Out: [R, D] in the input's dtype.
Maths: reference/oracle_math.md §1.7 (DeepSeek-V3's auxiliary-loss-free routing): float32 sigmoid
scores, a correction bias that takes part in the choice only, group-limited selection, weights
normalised over the chosen experts and scaled.
Not here: the grouped matrix product itself (operator ``moe``), the residual, the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.attention.step import AttentionStep
from gnomon.models.config import ModelConfig
from gnomon.models.linear import Linear, Param, SharedInput, tensor


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """One SwiGLU for all rows."""

    gate_up: Linear  # [2I, D], gate first
    down: Linear  # [D, I]

    @classmethod
    def of(cls, params: Mapping[str, Param], prefix: str) -> DenseFeedForward:
        """Take ``{prefix}.gate_up.weight`` and ``{prefix}.down.weight``."""
        return cls(Linear.of(params, f"{prefix}.gate_up"), Linear.of(params, f"{prefix}.down"))

    def __call__(self, x: SharedInput, step: AttentionStep) -> Tensor:
        """[R, D] -> [R, D]: ``down(silu(gate x) * up x)``."""
        hidden = self.gate_up(x, step.ops)
        if isinstance(self.down.weight, BlockFp8Weight):
            active = step.ops.silu_quantise(hidden, self.down.weight.is_power_of_two)
            return self.down(active, step.ops)
        gate, up = hidden.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, step.ops)


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router chooses: everything but its weights."""

    top_k: int
    num_groups: int
    top_groups: int
    is_normalised: bool
    scale: float


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's choice for every row."""

    scores: Tensor  # [R, E] float32, sigmoid, without the bias
    expert_ids: Tensor  # [R, k] int64
    margin: Tensor | None  # [R] float32: how far the nearest expert not chosen (or group) is


def route(x: Tensor, weight: Tensor, bias: Tensor, rule: RouterRule, want_margin: bool) -> Routing:
    """Choose ``top_k`` experts for every row of x [R, D].

    A group's score is the sum of its two best biased scores; experts outside the best
    ``top_groups`` groups cannot be chosen. With one group that step is the identity.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    scores = F.linear(x.to(compute), weight.to(compute)).sigmoid()
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
    return Routing(scores, choice.topk(rule.top_k, dim=-1).indices, margin)


def _edge(scores: Tensor, k: int) -> Tensor:
    """Gap between the k-th and the next best score of a row; +inf where all are taken."""
    if k >= scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], torch.inf)
    best = scores.topk(k + 1, dim=-1).values
    return (best[..., k - 1] - best[..., k]).nan_to_num(nan=torch.inf)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts plus the shared expert, which sees every row and is not scaled."""

    layer: int
    router_weight: Tensor  # [E, D]
    router_bias: Tensor  # [E] float32
    gate_up: Param  # [E, 2I, D]
    down: Param  # [E, D, I]; FP8 exactly if gate_up is
    shared: DenseFeedForward | None
    rule: RouterRule

    @classmethod
    def of(cls, params: Mapping[str, Param], layer: int, config: ModelConfig) -> MixtureOfExperts:
        """Take layer ``layer``'s router, experts and shared expert from ``params``."""
        prefix = f"layers.{layer}"
        has_shared = f"{prefix}.shared.down.weight" in params
        return cls(
            layer=layer,
            router_weight=tensor(params, f"{prefix}.router.weight"),
            router_bias=tensor(params, f"{prefix}.router.bias"),
            gate_up=params[f"{prefix}.experts.gate_up"],
            down=params[f"{prefix}.experts.down"],
            shared=DenseFeedForward.of(params, f"{prefix}.shared") if has_shared else None,
            rule=RouterRule(
                top_k=config.num_experts_per_tok,
                num_groups=config.n_group,
                top_groups=config.topk_group,
                is_normalised=config.norm_topk_prob,
                scale=config.routed_scaling_factor,
            ),
        )

    def __call__(self, x: SharedInput, step: AttentionStep) -> Tensor:
        """[R, D] -> [R, D]; padding rows get expert −1 and reach the shared expert only."""
        tap = step.tap
        want_margin = tap is not None and tap.wants_margin
        routing = route(x.values, self.router_weight, self.router_bias, self.rule, want_margin)
        expert_ids = routing.expert_ids
        if tap is not None:
            margin = routing.margin
            if margin is None:
                margin = expert_ids.new_full((expert_ids.shape[0],), torch.inf, dtype=torch.float32)
            expert_ids = tap.experts(self.layer, expert_ids, margin)
        weights = routing.scores.gather(1, expert_ids.clamp(min=0))
        if self.rule.is_normalised:
            weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
        rows = step.geometry.rows
        if rows.num_live < rows.num_rows or not rows.is_exact:
            expert_ids = expert_ids.masked_fill(~rows.is_live()[:, None], -1)
        routed = self._experts(x, expert_ids, weights.mul_(self.rule.scale), step)
        return routed if self.shared is None else routed + self.shared(x, step)

    def _experts(
        self, x: SharedInput, expert_ids: Tensor, weights: Tensor, step: AttentionStep
    ) -> Tensor:
        """Products of the routed experts, weighted and added."""
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, BlockFp8Weight) and isinstance(down, BlockFp8Weight):
            rows = x.quantised(gate_up.is_power_of_two)
            return step.ops.moe_fp8(rows, expert_ids, weights, gate_up, down)
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        return step.ops.moe(x.values, expert_ids, weights, gate_up, down)
