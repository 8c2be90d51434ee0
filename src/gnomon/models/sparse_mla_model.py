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

from gnomon.attention.block_fp8 import Fp8Rows
from gnomon.attention.geometry import RowTensor, require_axis
from gnomon.attention.indices import KeySet
from gnomon.attention.ops.fusions import may_stack
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.products import TORCH
from gnomon.attention.ops.values import Summands
from gnomon.attention.step import AttentionStep
from gnomon.models.config import ModelConfig
from gnomon.models.feed_forward import DenseFeedForward, MixtureOfExperts
from gnomon.models.indexer import Indexer, IndexQuery
from gnomon.models.linear import Linear, Param, SharedInput, scale_kind, stacked, tensor
from gnomon.models.mla import LatentAttention, Query
from gnomon.models.rotation import Rotations, rope_table

Stream = tuple[Tensor, Tensor | Summands | None]
"""The residual stream [R, D], and what the last block still adds to it."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """What a forward pass gives back, both on the step's row axis."""

    hidden: RowTensor  # [R, D] after the final norm
    nan_rows: RowTensor  # [R] bool: an index score of the row was NaN in some layer


@dataclass(frozen=True, slots=True, eq=False)
class LayerQueries:
    """What a layer asks of attention: of all rows, and of the SPARSE rows where it selects."""

    query: Query
    index: IndexQuery | None


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What attention gave a layer: data [R, H * dv], the keys and NaN flags of the SPARSE rows.

    In FP8 only where the step decodes (LatentAttention.attend).
    """

    data: Tensor | Fp8Rows
    keys: KeySet | None
    nan_rows: RowTensor | None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One decoder layer's weights. ``indexer`` is None where an earlier layer's keys are reused.

    ``queries``: attention's and the indexer's product of the query latent as one, if they lie so.
    """

    input_norm: Tensor  # [D]
    post_norm: Tensor  # [D]
    attention: LatentAttention
    indexer: Indexer | None
    feed_forward: DenseFeedForward | MixtureOfExperts
    queries: Linear | None = None

    @classmethod
    def of(cls, params: Mapping[str, Param], layer: int, config: ModelConfig) -> DecoderLayer:
        """Take layer ``layer`` from ``params``."""
        dense = config.is_dense_layer(layer)
        indexer = Indexer.of(params, layer, config) if config.has_indexer(layer) else None
        keys = None if indexer is None else indexer.key
        attention = LatentAttention.of(params, layer, config, beside=keys)
        return cls(
            input_norm=tensor(params, f"layers.{layer}.input_norm.weight"),
            post_norm=tensor(params, f"layers.{layer}.post_norm.weight"),
            attention=attention,
            indexer=indexer,
            feed_forward=DenseFeedForward.of(params, f"layers.{layer}.mlp")
            if dense
            else MixtureOfExperts.of(params, layer, config),
            queries=None if indexer is None else stacked(attention.q_b, indexer.query),
        )

    def prepare(self, h: SharedInput, rotations: Rotations, step: AttentionStep) -> LayerQueries:
        """Write the layer's cache entries; what it asks of attention."""
        q_latent, kv_raw = self.attention.enter(h, step)
        self._multiply_queries(q_latent, step)
        latent = self.attention.entry(kv_raw, rotations, step)
        index, weights = None, None
        if self.indexer is not None:
            index, weights = self.indexer.entry(h, q_latent, rotations, step)
        query, turned = self.attention.prepare(q_latent, (latent, index), rotations, step)
        if self.indexer is None or turned is None:
            return LayerQueries(query, None)
        return LayerQueries(query, self.indexer.weigh(h, turned, weights, step))

    def _multiply_queries(self, q_latent: SharedInput, step: AttentionStep) -> None:
        """In a step that decodes, both kinds of queries by one product, where that may be."""
        sparse, q_b = step.plan.sparse, self.attention.q_b
        are_all = step.plan.graph_key is not None and sparse is not None and sparse.rows is None
        if self.queries is None or self.indexer is None or not are_all:
            return
        if may_stack(step.ops):
            both = self.queries(q_latent, step.ops)
            q_latent.made[q_b] = both[:, : q_b.num_outputs]
            q_latent.made[self.indexer.query] = both[:, q_b.num_outputs :]

    def attend(self, queries: LayerQueries, keys: KeySet | None, step: AttentionStep) -> Attended:
        """Choose keys, or take those of an earlier layer; attend them."""
        nan_rows = None
        if self.indexer is not None and queries.index is not None:
            keys, nan_rows = self.indexer.select(queries.index, step)
        return Attended(self.attention.attend(queries.query, keys, step), keys, nan_rows)


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

        ``token_ids`` [R] int64 on ``step.geometry.rows``, 0 for padding rows. The parts follow:
        `rotations`, `embed`, then of each layer `enter`, `attend` and `leave`, at last `finish`.
        """
        rows, ops = step.geometry.rows, step.ops
        require_axis(rows, token_ids=token_ids)
        rotations = self.rotations(step)
        stream: Stream = (self.embed(token_ids.data), None)
        keys: KeySet | None = None
        faults: list[RowTensor] = []
        for number, layer in enumerate(self.layers):
            ops.begin_layer(number)
            x, queries = self.enter(number, stream, rotations, step)
            attended = layer.attend(queries, keys, step)
            keys = attended.keys
            faults += [attended.nan_rows] if attended.nan_rows is not None else []
            stream = self.leave(number, x, attended.data, step)
        return ForwardOutput(RowTensor(rows, self.finish(stream, ops)), any_fault(step, faults))

    def rotations(self, step: AttentionStep) -> Rotations:
        """The rotations of the step's rows, which all layers share."""
        return Rotations.of_step(self.rope_table, step, self.config)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[R, D] of token ids int64 [R]."""
        return self.embedding.index_select(0, token_ids)

    def enter(
        self, number: int, stream: Stream, rotations: Rotations, step: AttentionStep
    ) -> tuple[Tensor, LayerQueries]:
        """Layer ``number`` up to its attention; its entries are in the cache then.

        Returns the residual stream as one [R, D], and what is asked of attention.
        """
        layer = self.layers[number]
        kind = scale_kind(layer.attention.inputs[0].weight)
        norm = (layer.input_norm, self.config.rms_norm_eps)
        x, h = _normed(step.ops, stream, norm, kind)
        return x, layer.prepare(h, rotations, step)

    def leave(
        self, number: int, x: Tensor, attended: Tensor | Fp8Rows, step: AttentionStep
    ) -> Stream:
        """Layer ``number`` from what its attention gave, [R, H * dv], on; the stream behind it."""
        layer = self.layers[number]
        output = layer.attention.output
        if step.plan.graph_key is None:
            delta: Tensor | Summands = output(attended, step.ops)
        else:  # a step that decodes
            delta = output.unsummed(attended, step.ops)
        kind = scale_kind(layer.feed_forward.input_weight)
        norm = (layer.post_norm, self.config.rms_norm_eps)
        x, h = _normed(step.ops, (x, delta), norm, kind)
        return x, layer.feed_forward(h, step)

    def finish(self, stream: Stream, ops: Operators) -> Tensor:
        """[R, D]: the stream behind the last layer, normed."""
        norm = (self.final_norm, self.config.rms_norm_eps)
        return _normed(ops, stream, norm, None)[1].values

    @torch.inference_mode()
    def logits(
        self, hidden: Tensor, ops: Operators | None = None, out: Tensor | None = None
    ) -> Tensor:
        """[M, V] float32 (float64 for a float64 model) of hidden rows [M, D].

        ``ops``: those of the step, which multiply as it does; None: torch multiplies. ``out``:
        where they go, in its dtype.
        """
        products = TORCH if ops is None else ops.products
        logits = products.linear(hidden, self.head, None)
        if out is not None:
            return out.copy_(logits)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _normed(
    ops: Operators,
    stream: Stream,
    norm: tuple[Tensor, float],
    is_power_of_two: bool | None,
) -> tuple[Tensor, SharedInput]:
    """The residual stream (x, what is still to be added) as one, and its norm (weight, eps).

    ``is_power_of_two``: the scales of the FP8 weights that read the norm; None where none are.
    """
    x, normed, in_fp8 = ops.norm_quantise(*stream, norm, is_power_of_two)
    return x, SharedInput(normed, ops, in_fp8)


def any_fault(step: AttentionStep, faults: list[RowTensor]) -> RowTensor:
    """On the step's rows, bool [R]: whether any layer flagged the row."""
    rows, sparse = step.geometry.rows, step.plan.sparse
    flagged = torch.stack([fault.data for fault in faults]).any(0) if faults else None
    if sparse is not None and sparse.rows is None and flagged is not None:
        return RowTensor(rows, flagged)
    flags = torch.zeros(rows.num_rows, dtype=torch.bool, device=rows.device)
    if sparse is not None and sparse.rows is not None and flagged is not None:
        flags.index_copy_(0, sparse.rows, flagged)
    return RowTensor(rows, flags)
