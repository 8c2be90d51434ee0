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

from gnomon.attention.axes import RowAxis
from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.attention.ops.fusions import moe_parts, route_products
from gnomon.attention.ops.routing import RouterRule, Routing, expert_weights, with_shared
from gnomon.attention.ops.values import Summands
from gnomon.attention.step import AttentionStep
from gnomon.attention.taps import SelectionTap
from gnomon.models.config import ModelConfig
from gnomon.models.fp8_storage import joined
from gnomon.models.linear import Linear, Param, SharedInput, WideLinear, tensor


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """One SwiGLU for all rows."""

    gate_up: Linear  # [2I, D], gate first
    down: Linear  # [D, I]

    @classmethod
    def of(cls, params: Mapping[str, Param], prefix: str) -> DenseFeedForward:
        """Take ``{prefix}.gate_up.weight`` and ``{prefix}.down.weight``."""
        return cls(Linear.of(params, f"{prefix}.gate_up"), Linear.of(params, f"{prefix}.down"))

    @property
    def input_weight(self) -> Param:
        """The weight that reads the block's input."""
        return self.gate_up.weight

    def __call__(self, x: SharedInput, step: AttentionStep) -> Tensor | Summands:
        """[R, D] -> [R, D]: ``down(silu(gate x) * up x)``; a step that decodes may leave sums."""
        hidden = self.gate_up(x, step.ops)
        if isinstance(self.down.weight, BlockFp8Weight):
            active = step.ops.silu_quantise(hidden, self.down.weight.is_power_of_two)
            if step.plan.graph_key is not None:
                return self.down.unsummed(active, step.ops)
            return self.down(active, step.ops)
        gate, up = hidden.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, step.ops)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts plus the shared expert, which sees every row and is not scaled."""

    layer: int
    router: WideLinear  # [E, D]
    router_bias: Tensor  # [E] float32
    gate_up: Param  # [E, 2I, D]; E + 1 where the shared expert is one of them
    down: Param  # [E, D, I]; FP8 exactly if gate_up is
    shared: DenseFeedForward | None
    rule: RouterRule

    @classmethod
    def of(cls, params: Mapping[str, Param], layer: int, config: ModelConfig) -> MixtureOfExperts:
        """Take layer ``layer``'s router, experts and shared expert from ``params``."""
        prefix = f"layers.{layer}"
        norm = tensor(params, f"{prefix}.post_norm.weight")
        has_shared = f"{prefix}.shared.down.weight" in params
        shared = DenseFeedForward.of(params, f"{prefix}.shared") if has_shared else None
        gate_up, down = params[f"{prefix}.experts.gate_up"], params[f"{prefix}.experts.down"]
        both = None if shared is None else _joined((gate_up, down), shared)
        if both is not None:
            gate_up, down, shared = *both, None
        return cls(
            layer=layer,
            router=WideLinear.of(params, f"{prefix}.router", norm.dtype),
            router_bias=tensor(params, f"{prefix}.router.bias"),
            gate_up=gate_up,
            down=down,
            shared=shared,
            rule=RouterRule(
                top_k=config.num_experts_per_tok,
                num_groups=config.n_group,
                top_groups=config.topk_group,
                is_normalised=config.norm_topk_prob,
                scale=config.routed_scaling_factor,
                shared_expert=None if both is None else config.n_routed_experts,
            ),
        )

    @property
    def input_weight(self) -> Param:
        """The weight of the experts that reads the block's input."""
        return self.gate_up

    def __call__(self, x: SharedInput, step: AttentionStep) -> Tensor | Summands:
        """[R, D] -> [R, D]; padding rows get expert −1 and reach the shared expert only.

        A step that decodes may leave the experts' shares to the norm that follows.
        """
        expert_ids, weights = self._route(x.values, step)
        routed = self._experts(x, expert_ids, weights, step)
        return routed if self.shared is None else _total(routed) + _total(self.shared(x, step))

    def _route(self, x: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        """Experts of every row of x [R, D], and their weights."""
        tap, rows = step.tap, step.geometry.rows
        has_padding = rows.num_live < rows.num_rows or not rows.is_exact
        request, parts = rows.request if has_padding else None, self.router.parts
        if tap is None and parts is not None:
            given = self.router_bias, request
            routing = route_products(step.ops, x, parts, given, self.rule)
            if routing is not None:
                return routing.expert_ids, routing.weights
        logits = self.router(x, step.ops)
        want_margin = tap is not None and tap.wants_margin
        routing = step.ops.route_experts(logits, self.router_bias, request, self.rule, want_margin)
        if tap is None:
            return routing.expert_ids, routing.weights
        return self._told(tap, routing, logits, rows)

    def _told(
        self, tap: SelectionTap, routing: Routing, logits: Tensor, rows: RowAxis
    ) -> tuple[Tensor, Tensor]:
        """The experts that the tap, told of the choice, has the rows go to, and their weights."""
        ids, margin = routing.expert_ids[:, : self.rule.top_k], routing.margin
        if margin is None:
            margin = ids.new_full((ids.shape[0],), torch.inf, dtype=torch.float32)
        told = tap.experts(self.layer, ids, margin)
        if told is ids:
            return routing.expert_ids, routing.weights
        told = told.masked_fill(~rows.is_live()[:, None], -1)
        weights = expert_weights(logits, told, self.rule)
        return with_shared(told, weights, rows.request, self.rule)

    def _experts(
        self, x: SharedInput, expert_ids: Tensor, weights: Tensor, step: AttentionStep
    ) -> Tensor | Summands:
        """Products of the routed experts, weighted and added."""
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, BlockFp8Weight) and isinstance(down, BlockFp8Weight):
            rows = x.quantised(gate_up.is_power_of_two)
            if step.plan.graph_key is not None:
                return moe_parts(step.ops, rows, (expert_ids, weights), gate_up, down)
            return step.ops.moe_fp8(rows, expert_ids, weights, gate_up, down)
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        return step.ops.moe(x.values, expert_ids, weights, gate_up, down)


def _total(value: Tensor | Summands) -> Tensor:
    return value.total() if isinstance(value, Summands) else value


def _joined(
    experts: tuple[Param, Param], shared: DenseFeedForward
) -> tuple[BlockFp8Weight, BlockFp8Weight] | None:
    """Gate_up and down with the shared expert as one of the experts, where it lies behind them."""
    found = []
    for many, one in zip(experts, (shared.gate_up.weight, shared.down.weight), strict=True):
        if not (isinstance(many, BlockFp8Weight) and isinstance(one, BlockFp8Weight)):
            return None
        found.append(joined(many, one))
    gate_up, down = found
    return None if gate_up is None or down is None else (gate_up, down)
