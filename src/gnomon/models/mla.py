"""Multi-head latent attention of one layer, over both routes.

In:  the layer's normed input h [R, D] on the step's row axis, the rotations, the key set.
Out: what attention reads, what it gives [R, H * dv], the block's output [R, D] before the residual.
Maths: oracle_math.md §1.2. SPARSE rows run absorbed: queries are carried into the latent space,
attend the chosen latents and are carried back. DENSE rows run un-absorbed: their context is read
from the cache in chunks, expanded to heads and attended; chunks are joined by their lse. Both read
keys from the cache, also those written a moment ago, so that they see the same rounded values.
Not here: choosing keys (indexer.py), choosing routes (attention/plan.py), attention itself (ops).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import Fp8Rows
from gnomon.attention.geometry import RowSubset, RowTensor
from gnomon.attention.indices import KeySet
from gnomon.attention.ops.fusions import (
    IndexEntry,
    LatentEntry,
    absorb,
    heads_quantise,
    prepare_attention,
    sparse_values,
)
from gnomon.attention.plan import ContextChunk
from gnomon.attention.step import AttentionStep
from gnomon.models.config import ModelConfig
from gnomon.models.linear import (
    Linear,
    Param,
    SharedInput,
    dequantised,
    scale_kind,
    stacked,
    tensor,
)
from gnomon.models.rotation import Rotations


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Per-head queries of every row, rotated: nope [R, H, dn], rope [R, H, D_r].

    ``room`` [R, H, D_c]: where absorbed queries go, so that ``rope`` stands behind them: what some
    kernels read is one tensor then.
    """

    nope: RowTensor
    rope: RowTensor
    room: Tensor | None = None

    def take(self, subset: RowSubset) -> Query:
        """The queries of a subset of the rows."""
        return Query(subset.take(self.nope), subset.take(self.rope))


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Weights of one layer's attention."""

    part: str
    num_heads: int
    nope_dim: int
    latent_dim: int
    scale: float
    latent_eps: float
    inputs: tuple[Linear, ...]  # q_a [rq, D] and kv_a [D_c + D_r, D], or both as one product
    between: Linear | None  # the layer of that product's columns between theirs, if there is one
    q_rank: int
    q_a_norm: Tensor  # [rq]
    q_b: Linear  # [H * (dn + D_r), rq]
    kv_a_norm: Tensor  # [D_c]
    kv_b: Tensor  # [H * (dn + dv), D_c], never FP8: absorption multiplies by its parts
    up_key: Tensor  # [H, dn, D_c], W_UK: a view of kv_b
    up_value: Tensor  # [H, dv, D_c], W_UV: a view of kv_b
    output: Linear  # [D, H * dv]

    @classmethod
    def of(
        cls,
        params: Mapping[str, Param],
        layer: int,
        config: ModelConfig,
        beside: Linear | None = None,
    ) -> LatentAttention:
        """Take layer ``layer``'s attention weights; W_UK and W_UV are views of kv_b.

        ``beside``: another layer that reads the block's input, the indexer's keys.
        """
        prefix = f"layers.{layer}.attn"
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        q_a_norm = tensor(params, f"{prefix}.q_a_norm.weight")
        kv_b = dequantised(params[f"{prefix}.kv_b.weight"], q_a_norm.dtype)
        q_a, kv_a = Linear.of(params, f"{prefix}.q_a"), Linear.of(params, f"{prefix}.kv_a")
        up = kv_b.view(heads, nope + config.v_head_dim, config.kv_lora_rank)
        inputs, between = _joined_inputs(q_a, beside, kv_a)
        return cls(
            part=latent_part(layer),
            num_heads=heads,
            nope_dim=nope,
            latent_dim=config.kv_lora_rank,
            scale=config.softmax_scale(),
            latent_eps=config.latent_norm_eps,
            inputs=inputs,
            between=between,
            q_rank=config.q_lora_rank,
            q_a_norm=q_a_norm,
            q_b=Linear.of(params, f"{prefix}.q_b"),
            kv_a_norm=tensor(params, f"{prefix}.kv_a_norm.weight"),
            kv_b=kv_b,
            up_key=up[:, :nope],
            up_value=up[:, nope:],
            output=Linear.of(params, f"{prefix}.o"),
        )

    def enter(self, h: SharedInput, step: AttentionStep) -> tuple[SharedInput, Tensor]:
        """The query latent cq [R, rq], normalised, and raw key latents [R, D_c + D_r].

        cq is what the indexer reads too. Rows may be strided: both may be parts of one product,
        and what that made for others is told to ``h``.
        """
        products = [layer(h, step.ops) for layer in self.inputs]
        q_raw, kv_raw = products[0], products[-1]
        if len(products) == 1:
            end = self.q_rank + (0 if self.between is None else self.between.num_outputs)
            q_raw, kv_raw = q_raw[:, : self.q_rank], q_raw[:, end:]
            if self.between is not None:
                h.made[self.between] = products[0][:, self.q_rank : end]
        _, q_latent, in_fp8 = step.ops.norm_quantise(
            q_raw, None, (self.q_a_norm, self.latent_eps), scale_kind(self.q_b.weight)
        )
        return SharedInput(q_latent, step.ops, in_fp8), kv_raw

    def entry(self, kv_raw: Tensor, rotations: Rotations, step: AttentionStep) -> LatentEntry:
        """What the step's tokens write to the cache."""
        return LatentEntry(
            raw=step.on_write_axis(RowTensor(step.geometry.rows, kv_raw)),
            norm_weight=self.kv_a_norm,
            eps=self.latent_eps,
            rope=rotations.key,
            pool=step.pool(self.part),
            writes=step.geometry.writes["tokens"],
        )

    def prepare(
        self,
        q_latent: SharedInput,
        entries: tuple[LatentEntry, IndexEntry | None],
        rotations: Rotations,
        step: AttentionStep,
    ) -> tuple[Query, RowTensor | None]:
        """Write the cache's entries; queries of all rows, index queries where there are any."""
        rows = step.geometry.rows
        heads = self.q_b(q_latent, step.ops).view(rows.num_rows, self.num_heads, -1)
        nope, rope = heads[..., : self.nope_dim], heads[..., self.nope_dim :]
        out = room = None
        if step.plan.graph_key is not None:  # a step that decodes
            joint = rope.new_empty((*rope.shape[:2], self.latent_dim + rope.shape[2]))
            room, out = joint[..., : self.latent_dim], joint[..., self.latent_dim :]
        turned, index_query = prepare_attention(step.ops, rope, rotations.query, *entries, out)
        room = room if turned is out else None
        return Query(RowTensor(rows, nope), RowTensor(rows, turned), room), index_query

    def attend(self, query: Query, keys: KeySet | None, step: AttentionStep) -> Tensor | Fp8Rows:
        """[R, H * dv]: every row over its own keys, by the route that the plan gave its request.

        ``keys`` are on ``plan.sparse.axis``; None where no row is SPARSE. A step that decodes gives
        FP8 where the output's weight reads it and one launch makes it.
        """
        rows, plan = step.geometry.rows, step.plan
        is_whole = plan.sparse is not None and plan.sparse.rows is None
        if plan.graph_key is not None and is_whole and keys is not None:
            latents = self._attend_sparse(query, keys, step).data
            kind = scale_kind(self.output.weight)
            return heads_quantise(step.ops, latents, self._to_values, kind)
        parts: list[tuple[RowSubset, RowTensor]] = []
        if plan.sparse is not None and keys is not None:
            latents = self._attend_sparse(query.take(plan.sparse), keys, step).data
            # Heads of a row side by side, as the output's product reads them: no copy after this.
            value = step.ops.multiply_heads(latents, self._to_values, is_packed=True)
            parts.append((plan.sparse, RowTensor(plan.sparse.axis, value)))
        if plan.dense is not None:
            parts.append((plan.dense, self._attend_dense(query.take(plan.dense), step)))
        return RowSubset.restore(rows, parts).data.flatten(1)

    @property
    def _to_values(self) -> Tensor:
        """W_UV as [H, D_c, dv]."""
        return self.up_value.transpose(1, 2)

    def _attend_sparse(self, query: Query, keys: KeySet, step: AttentionStep) -> RowTensor:
        """Absorbed: latents [M, H, D_c]."""
        absorbed = absorb(step.ops, query.nope.data, self.up_key, query.room)  # [M, H, D_c]
        return sparse_values(
            step.ops,
            (RowTensor(query.nope.axis, absorbed), query.rope),
            step.pool(self.part),
            keys,
            step.geometry.tables["tokens"],
            self.scale,
        )

    def _attend_dense(self, query: Query, step: AttentionStep) -> RowTensor:
        """Un-absorbed: [M, H, dv]; a row's partial results of several chunks are joined by lse."""
        axis = query.nope.axis
        q = torch.cat((query.nope.data, query.rope.data), dim=-1)
        out = q.new_zeros((axis.num_rows, self.num_heads, self.up_value.shape[1]))
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full(out.shape[:2], -torch.inf, dtype=lse_dtype)
        is_begun = bytearray(axis.num_rows)  # rows that an earlier chunk has written
        for chunk in step.plan.context_chunks:
            key, value = self._expand(chunk, step)
            for piece in chunk.pieces:
                rows = slice(piece.row_start, piece.row_stop)
                keys = slice(piece.key_offset, piece.key_offset + piece.num_keys)
                visible = (axis.kv_len[rows] - piece.key_start).clamp(0, piece.num_keys)
                partial = step.ops.dense_mha(q[rows], key[keys], value[keys], visible, self.scale)
                if is_begun[piece.row_start]:
                    partial = step.ops.lse_merge((out[rows], lse[rows]), partial)
                is_begun[rows] = b"\1" * piece.num_rows
                out[rows], lse[rows] = partial
        return RowTensor(axis, out)

    def _expand(self, chunk: ContextChunk, step: AttentionStep) -> tuple[Tensor, Tensor]:
        """Keys [N, H, dn + D_r] and values [N, H, dv] of a chunk, read through the layout."""
        pool, table = step.pool(self.part), step.geometry.tables["tokens"]
        gathered = [
            step.ops.context_gather(pool, table, part.request, part.start, part.stop)
            for part in chunk.gathers
        ]
        entries = gathered[0] if len(gathered) == 1 else torch.cat(gathered)
        latent, rope = entries[:, : self.latent_dim], entries[:, self.latent_dim :]
        heads = step.ops.linear(latent, self.kv_b).view(len(latent), self.num_heads, -1)
        key_nope, value = heads[..., : self.nope_dim], heads[..., self.nope_dim :]
        return torch.cat((key_nope, rope[:, None].expand(-1, self.num_heads, -1)), dim=-1), value


def _joined_inputs(
    q_a: Linear, beside: Linear | None, kv_a: Linear
) -> tuple[tuple[Linear, ...], Linear | None]:
    """Both as one product where that may be, with the layer ``beside`` them or without it."""
    if beside is not None:
        whole = stacked(q_a, beside, kv_a)
        if whole is not None:
            return (whole,), beside
    whole = stacked(q_a, kv_a)
    return (q_a, kv_a) if whole is None else (whole,), None


def latent_part(layer: int) -> str:
    """Name of the cache part that holds a layer's latents."""
    return f"layers.{layer}.latent"
