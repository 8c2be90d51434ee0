"""Operators: the bound set of operators that a model calls; axes are checked at this entry.

In:  values that belong to row axes (RowTensor, KeySet, RopeRows, WriteSlots), pools, page tables.
Out: values on the same axes. A value of another axis raises GeometryError that names both axes.
The maths lives in the providers, one plain function on tensors per operator; their contracts are
in spec.py, their formulas in oracle_math.md §1. Not here: the choice of providers (dispatch.py),
the loop over score chunks (select.py).

Padding contract, for every operator: a row with no keys gives output 0 and lse −inf, a slot of −1
writes nothing, an expert of −1 adds nothing; nothing of a padding row is ever NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import BlockFp8Weight, Fp8Rows
from gnomon.attention.geometry import Geometry, PageTable, RowTensor, WriteSlots, require_axis
from gnomon.attention.indices import KeySet
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops import fusions
from gnomon.attention.ops.attend import attend_key_set
from gnomon.attention.ops.fusions import IndexEntry, LatentEntry
from gnomon.attention.ops.products import TORCH, Products
from gnomon.attention.ops.routing import RouterRule, Routing
from gnomon.attention.ops.select import SelectKernels, select_keys
from gnomon.attention.ops.values import AttentionOut, IndexTransform, RopeRows, Selection, Summands
from gnomon.attention.ops.workspace import UnpackedMla
from gnomon.attention.plan import StepPlan
from gnomon.errors import GeometryError

Kernel = Callable[..., Any]


class Operators:
    """One kernel per operator, chosen before the first step (dispatch.bind_operators)."""

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        providers: Mapping[str, str] | None = None,
        fused: Mapping[str, Kernel] | None = None,
        unpacked: UnpackedMla | None = None,
        products: Products = TORCH,
    ) -> None:
        """``providers``: operator to the name of whom its kernel is from, where that is known.

        ``fused``: kernels that stand for several operators (ops/fusions.py); none: the parts.
        ``unpacked``: attends packed latents by way of a workspace, where that is quicker.
        ``products``: who multiplies with plain weights.
        """
        self.kernels: Mapping[str, Kernel] = dict(kernels)
        self.providers: Mapping[str, str] = dict(providers or {})
        self.fusions: Mapping[str, Kernel] = dict(fused or {})
        self.unpacked = unpacked
        self.products = products
        self._rms_norm: Callable[[Tensor, Tensor, float], Tensor] = kernels["rms_norm"]
        self._layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = kernels["layer_norm"]
        self._rope: Callable[[Tensor, RopeRows], Tensor] = kernels["rope"]
        self._latent_write = kernels["latent_write"]
        self._index_prepare = kernels["index_prepare"]
        self._dense_mha = kernels["dense_mha"]
        self._context_gather = kernels["context_gather"]
        self._lse_merge = kernels["lse_merge"]
        self._moe = kernels["moe"]
        self._quantise_rows = kernels["quantise_rows"]
        self._silu_quantise = kernels["silu_quantise"]
        self._linear_fp8 = kernels["linear_fp8"]
        self._moe_fp8 = kernels["moe_fp8"]

    def begin_layer(self, layer: int) -> None:
        """The calls from here on are of this layer. For sets of operators that watch or record."""

    def linear(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[M, N] of x [M, K] and weight [N, K]; of ``dtype``, where that is not theirs."""
        return self.products.linear(x, weight, dtype)

    def multiply_heads(self, x: Tensor, weight: Tensor, is_packed: bool = False) -> Tensor:
        """[M, H, N] of x [M, H, K] and weight [H, K, N]; ``is_packed``: contiguous, or any way."""
        return self.products.by_head(x, weight, is_packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dim: x * rsqrt(mean(x²) + eps) * weight; fp32 inside, one rounding."""
        return self._rms_norm(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x − mean) * rsqrt(var + eps) * weight + bias over the last dim; one rounding."""
        return self._layer_norm(x, weight, bias, eps)

    def rope(self, x: Tensor, rows: RopeRows) -> Tensor:
        """Rotate the first ``rows.dim`` columns of x [R, ..., D]; the others pass through."""
        if x.shape[0] != rows.axis.num_rows:
            raise GeometryError(
                f"rope: x has {x.shape[0]} rows, its rotations belong to axis "
                f"'{rows.axis.label}' of {rows.axis.num_rows}"
            )
        return self._rope(x, rows)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, its rms_norm): a residual and the norm that reads it."""
        return fusions.add_rms_norm(self, x, delta, weight, eps)

    def norm_quantise(
        self,
        x: Tensor,
        delta: Tensor | Summands | None,
        norm: tuple[Tensor, float],
        is_power_of_two: bool | None,
    ) -> tuple[Tensor, Tensor, Fp8Rows | None]:
        """(x + delta, its rms_norm by (weight, eps), that in FP8 where one launch gives it too)."""
        return fusions.norm_quantise(self, (x, delta), norm, is_power_of_two)

    def route_experts(
        self,
        logits: Tensor,
        bias: Tensor,
        request: Tensor | None,
        rule: RouterRule,
        want_margin: bool = False,
    ) -> Routing:
        """Experts and weights of every row of logits [R, E]; −1 where ``request`` [R] is < 0."""
        return fusions.route_experts(self, (logits, bias, request), rule, want_margin)

    def prepare_attention(
        self, q_rope: Tensor, rope: RopeRows, latent: LatentEntry, index: IndexEntry | None
    ) -> tuple[Tensor, RowTensor | None]:
        """latent_write, index_prepare (if there is an ``index``) and rope of q_rope [R, H, D_r].

        Returns (q_rope turned, index queries turned).
        """
        return fusions.prepare_attention(self, q_rope, rope, latent, index)

    def latent_write(
        self,
        kv_raw: RowTensor,
        norm_weight: Tensor,
        eps: float,
        rope: RopeRows,
        pool: PagedPool,
        writes: WriteSlots,
    ) -> None:
        """Write [rms_norm(c) | rope(kr)] of kv_raw [N, D_c + D_r] to the slots of its rows."""
        if kv_raw.axis is not writes.axis or rope.axis is not writes.axis:
            require_axis(writes.axis, kv_raw=kv_raw, rope=rope)
        self._latent_write(kv_raw.data, norm_weight, eps, rope, pool, writes.slots)

    def index_prepare(
        self,
        q_raw: RowTensor,
        k_raw: RowTensor,
        transform: IndexTransform,
        rope: tuple[RopeRows, RopeRows],
        pool: PagedPool,
        writes: WriteSlots,
    ) -> RowTensor:
        """Transform index queries [R, Hi, Di] and keys [N, Di]; write the keys; return the queries.

        ``rope`` holds the rotations of the query's and of the key's axis (often the same value).
        """
        if k_raw.axis is not writes.axis or rope[1].axis is not writes.axis:
            require_axis(writes.axis, k_raw=k_raw, key_rope=rope[1])
        if rope[0].axis is not q_raw.axis:
            require_axis(q_raw.axis, query_rope=rope[0])
        query = self._index_prepare(q_raw.data, k_raw.data, transform, rope, pool, writes.slots)
        return RowTensor(q_raw.axis, query)

    def index_select(
        self,
        query: RowTensor,
        head_weights: RowTensor,
        pool: PagedPool,
        geometry: Geometry,
        plan: StepPlan,
        want_margin: bool = False,
    ) -> Selection:
        """The K best keys of every row of query [R, Hi, Di], head_weights [R, Hi].

        score[t, s] = Σ_h w[t, h] · Hi^-0.5 · Di^-0.5 · relu(q[t, h] · k[s]) over the row's visible
        keys; higher first, ties to the lower position. A row with kv_len ≤ K gets every key and no
        scores are computed for it. Follows plan.score_chunks.
        """
        if head_weights.axis is not query.axis:
            require_axis(query.axis, head_weights=head_weights)
        bound = SelectKernels(self.kernels, self.fusions)
        return select_keys(bound, query, head_weights, pool, geometry, plan, want_margin)

    def sparse_mla(
        self,
        q_latent: RowTensor,
        q_rope: RowTensor,
        pool: PagedPool,
        keys: KeySet,
        table: PageTable,
        scale: float,
    ) -> AttentionOut:
        """Absorbed MLA of q_latent [R, H, D_c] and q_rope [R, H, D_r] over each row's own keys.

        softmax(scale · (q_latent · c_s + q_rope · kr_s)) over the key set; out = Σ_s a_s c_s. A
        sink takes part in the softmax's sum, not in the lse.
        """
        axis = q_latent.axis
        if q_rope.axis is not axis or keys.axis is not axis:
            require_axis(axis, q_rope=q_rope, keys=keys)
        queries = q_latent.data, q_rope.data
        out, lse = attend_key_set(self.kernels, queries, pool, keys, table, scale, self.unpacked)
        return AttentionOut(RowTensor(axis, out), RowTensor(axis, lse))

    def dense_mha(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of q [M, H, D] over the first ``visible[m]`` of k [N, H, D], v [N, H, Dv].

        Returns (out [M, H, Dv], lse [M, H]); a row that sees nothing gives 0 and −inf.
        """
        result: tuple[Tensor, Tensor] = self._dense_mha(q, k, v, visible, scale)
        return result

    def context_gather(
        self, pool: PagedPool, table: PageTable, request: int, start: int, stop: int
    ) -> Tensor:
        """Entries start..stop−1 of one request, [stop − start, D], through the pool's layout."""
        gathered: Tensor = self._context_gather(pool, table.pages[request], start, stop - start)
        return gathered

    def lse_merge(
        self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Join two partial attentions (out [..., D], lse [...]) over disjoint keys.

        (0, −inf) is the identity: merging with it returns the other, bit for bit.
        """
        merged: tuple[Tensor, Tensor] = self._lse_merge(a[0], a[1], b[0], b[1])
        return merged

    def moe(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        """Σ_j weight[r, j] · down_e(silu(gate_e x_r) · up_e x_r), e = expert_ids[r, j]; −1 adds 0.

        x [R, D], ids and weights [R, k], gate_up [E, 2I, D] (gate rows first), down [E, D, I].
        """
        mixed: Tensor = self._moe(x, expert_ids, expert_weights, gate_up, down)
        return mixed

    def quantise_rows(self, x: Tensor, is_power_of_two: bool) -> Fp8Rows:
        """Rows [M, K] in FP8: scale = max(largest magnitude of 128 columns, 1e-4) / 448."""
        codes, scales = self._quantise_rows(x, is_power_of_two)
        return Fp8Rows(codes, scales, x.dtype)

    def silu_quantise(self, hidden: Tensor, is_power_of_two: bool) -> Fp8Rows:
        """silu(gate) · up in FP8, of hidden [M, 2 I] with the gate's columns first."""
        codes, scales = self._silu_quantise(hidden, is_power_of_two)
        return Fp8Rows(codes, scales, hidden.dtype)

    def linear_fp8(self, x: Fp8Rows, weight: BlockFp8Weight) -> Tensor:
        """[M, N] of x [M, K] and weight [N, K]: fp32 sums, scaled per group and block."""
        product: Tensor = self._linear_fp8(x.codes, x.scales, weight.codes, weight.scales, x.dtype)
        return product

    def moe_fp8(
        self,
        x: Fp8Rows,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: BlockFp8Weight,
        down: BlockFp8Weight,
    ) -> Tensor:
        """``moe`` with FP8 weights; silu(gate) · up is quantised too, from fp32."""
        mixed: Tensor = self._moe_fp8(
            (x.codes, x.scales),
            expert_ids,
            expert_weights,
            (gate_up.codes, gate_up.scales),
            (down.codes, down.scales),
            down.is_power_of_two,
            x.dtype,
        )
        return mixed
