"""The decoder of DeepSeek-V3.2 and GLM-5: latent attention over chosen keys, then feed-forward.

In:  token ids on the step's row axis, and the AttentionStep.
Out: hidden states after the final norm on the same axis, and the rows whose index scores held NaN;
     logits [M, V] float32 of the rows that the caller picks.
Maths: oracle_math.md §1.1 and §1.6. A layer without an indexer of its own attends what the nearest
earlier layer with one selected for the same rows.
Not here: batching, sampling, pages, the MTP layer (its weights are skipped at loading).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.geometry import RowTensor, require_axis
from gnomon.attention.indices import KeySet
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.products import TORCH
from gnomon.attention.step import AttentionStep
from gnomon.models.config import ModelConfig
from gnomon.models.feed_forward import DenseFeedForward, MixtureOfExperts
from gnomon.models.indexer import Indexer
from gnomon.models.linear import Param, SharedInput, scale_kind, tensor
from gnomon.models.mla import LatentAttention, Query
from gnomon.models.rotation import Rotations, rope_table


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """What a forward pass gives back, both on the step's row axis."""

    hidden: RowTensor  # [R, D] after the final norm
    nan_rows: RowTensor  # [R] bool: an index score of the row was NaN in some layer


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One decoder layer's weights. ``indexer`` is None where an earlier layer's keys are reused."""

    input_norm: Tensor  # [D]
    post_norm: Tensor  # [D]
    attention: LatentAttention
    indexer: Indexer | None
    feed_forward: DenseFeedForward | MixtureOfExperts

    @classmethod
    def of(cls, params: Mapping[str, Param], layer: int, config: ModelConfig) -> DecoderLayer:
        """Take layer ``layer`` from ``params``."""
        dense = config.is_dense_layer(layer)
        return cls(
            input_norm=tensor(params, f"layers.{layer}.input_norm.weight"),
            post_norm=tensor(params, f"layers.{layer}.post_norm.weight"),
            attention=LatentAttention.of(params, layer, config),
            indexer=Indexer.of(params, layer, config) if config.has_indexer(layer) else None,
            feed_forward=DenseFeedForward.of(params, f"layers.{layer}.mlp")
            if dense
            else MixtureOfExperts.of(params, layer, config),
        )

    def prepare(
        self, h: SharedInput, rotations: Rotations, step: AttentionStep
    ) -> tuple[Query, RowTensor | None]:
        """Write the layer's cache entries; queries of all rows, index queries of SPARSE rows."""
        q_latent, kv_raw = self.attention.enter(h, step)
        latent = self.attention.entry(kv_raw, rotations, step)
        index = None
        if self.indexer is not None:
            index = self.indexer.entry(h, q_latent, rotations, step)
        return self.attention.prepare(q_latent, (latent, index), rotations, step)


class SparseMlaModel:
    """A model ready to run; immutable after construction."""

    def __init__(
        self, config: ModelConfig, params: Mapping[str, Param], num_positions: int
    ) -> None:
        """Views of ``params`` (internal names of models/params.py); nothing is copied."""
        self.config = config
        self.embedding = tensor(params, "embed.weight")
        self.final_norm = tensor(params, "norm.weight")
        self.head = tensor(params, "lm_head.weight")
        self.layers = tuple(
            DecoderLayer.of(params, layer, config) for layer in range(config.num_hidden_layers)
        )
        self.rope_table = rope_table(config, num_positions, self.embedding.device)

    @torch.inference_mode()
    def forward(self, token_ids: RowTensor, step: AttentionStep) -> ForwardOutput:
        """Hidden states of every row of the step; padding rows hold finite, unused values.

        ``token_ids`` [R] int64 on ``step.geometry.rows``, 0 for padding rows.
        """
        rows, ops, eps = step.geometry.rows, step.ops, self.config.rms_norm_eps
        require_axis(rows, token_ids=token_ids)
        rotations = Rotations.of_step(self.rope_table, step, self.config)
        x = self.embedding.index_select(0, token_ids.data)
        delta: Tensor | None = None  # what the last block adds to x
        keys: KeySet | None = None
        faults: list[RowTensor] = []
        for number, layer in enumerate(self.layers):
            ops.begin_layer(number)
            kind = scale_kind(layer.attention.inputs[0].weight)
            x, h = _normed(ops, (x, delta), (layer.input_norm, eps), kind)
            query, index_query = layer.prepare(h, rotations, step)
            if layer.indexer is not None and index_query is not None:
                keys, nan_rows = layer.indexer.select(h, index_query, step)
                faults += [nan_rows] if nan_rows is not None else []
            delta = layer.attention.attend(query, keys, step)
            kind = scale_kind(layer.feed_forward.input_weight)
            x, h = _normed(ops, (x, delta), (layer.post_norm, eps), kind)
            delta = layer.feed_forward(h, step)
        _, hidden = _normed(ops, (x, delta), (self.final_norm, eps), None)
        return ForwardOutput(RowTensor(rows, hidden.values), _any_fault(step, faults))

    @torch.inference_mode()
    def logits(self, hidden: Tensor, ops: Operators | None = None) -> Tensor:
        """[M, V] float32 (float64 for a float64 model) of hidden rows [M, D].

        ``ops``: those of the step, which multiply as it does; None: torch multiplies.
        """
        products = TORCH if ops is None else ops.products
        logits = products.linear(hidden, self.head, None)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _normed(
    ops: Operators,
    stream: tuple[Tensor, Tensor | None],
    norm: tuple[Tensor, float],
    is_power_of_two: bool | None,
) -> tuple[Tensor, SharedInput]:
    """The residual stream (x, what is still to be added) as one, and its norm (weight, eps).

    ``is_power_of_two``: the scales of the FP8 weights that read the norm; None where none are.
    """
    x, normed, in_fp8 = ops.norm_quantise(*stream, norm, is_power_of_two)
    return x, SharedInput(normed, ops, in_fp8)


def _any_fault(step: AttentionStep, faults: list[RowTensor]) -> RowTensor:
    """On the step's rows, bool [R]: whether any layer flagged the row."""
    rows, sparse = step.geometry.rows, step.plan.sparse
    flags = torch.zeros(rows.num_rows, dtype=torch.bool, device=rows.device)
    if sparse is not None and faults:
        flagged = torch.stack([fault.data for fault in faults]).any(0)
        if sparse.rows is None:
            return RowTensor(rows, flagged)
        flags.index_copy_(0, sparse.rows, flagged)
    return RowTensor(rows, flags)
