"""Fusions: several operators in one launch, where one provider serves all of them and offers it.

In:  what the operators take. Out: what they give, to the bit: a fusion has no contract of its own,
     it is its parts, called in the order of FUSIONS. Where it is not bound, its parts run; so they
     do in operators that check or record calls, which therefore see every part.
Not here: kernels (providers/triton/{prepare,rows,index,topk}.py), who is bound (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.block_fp8 import BlockFp8Weight, Fp8Rows
from gnomon.attention.geometry import PageTable, RowTensor, WriteSlots, require_axis
from gnomon.attention.indices import KeySet
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.attend import attend_values, has_values
from gnomon.attention.ops.products import TORCH
from gnomon.attention.ops.routing import RouterRule, Routing, route
from gnomon.attention.ops.values import IndexTransform, RopeRows, RopeTable, Summands

if TYPE_CHECKING:
    from gnomon.attention.ops.operators import Operators

FUSIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "add_rms_norm": ("rms_norm",),
        "norm_quantise": ("rms_norm", "quantise_rows"),
        "heads_quantise": ("quantise_rows",),  # and products.by_head, likewise the next two
        "index_products": ("index_prepare",),
        "route_products": ("rms_norm",),
        "route_experts": ("rms_norm",),  # its part is routing.route: whoever runs the rows may
        "prepare_attention": ("latent_write", "index_prepare", "rope"),
        "write_latent_and_rope": ("latent_write", "rope"),
        "lazy_scores_paged": ("index_scores_paged",),
        "lazy_scores": ("index_scores",),
        "topk_slots": ("topk",),
        "linear_fp8_parts": ("linear_fp8", "rms_norm", "quantise_rows"),  # norm_quantise adds them
        "moe_fp8_parts": ("moe_fp8", "rms_norm", "quantise_rows"),
        "rope_rows": ("rope",),  # RopeTable.at
        "move_slots": ("context_gather",),  # workspace.move_slots, beside the gather
    }
)
"""Name -> the operators that it stands for; all from one provider, or it is not bound."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentEntry:
    """The latents that a layer writes: raw [N, D_c + D_r], what is done to them, where they go."""

    raw: RowTensor
    norm_weight: Tensor
    eps: float
    rope: RopeRows
    pool: PagedPool
    writes: WriteSlots


@dataclass(frozen=True, slots=True, eq=False)
class IndexEntry:
    """Index queries [R, Hi, Di] to turn and index keys [N, Di] to write, both raw.

    ``rope``: rotations of the query's and of the key's axis.
    """

    query: RowTensor
    key: RowTensor
    transform: IndexTransform
    rope: tuple[RopeRows, RopeRows]
    pool: PagedPool
    writes: WriteSlots


def add_rms_norm(
    ops: Operators, x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + delta, rms_norm(x + delta))."""
    fused = ops.fusions.get("add_rms_norm")
    if fused is not None:
        both: tuple[Tensor, Tensor] = fused(x, delta, weight, eps)
        return both
    total = x + delta
    return total, ops.rms_norm(total, weight, eps)


def norm_quantise(
    ops: Operators,
    given: tuple[Tensor, Tensor | Summands | None],
    norm: tuple[Tensor, float],
    is_power_of_two: bool | None,
) -> tuple[Tensor, Tensor, Fp8Rows | None]:
    """(x + delta, its norm, the norm in FP8) of ``given`` (x, delta), norm (weight, eps).

    Without a delta x comes back. The FP8 rows are None where they are not asked for
    (``is_power_of_two`` None) or not made here: quantise_rows makes them when they are needed.
    """
    x, delta = given
    fused = ops.fusions.get("norm_quantise")
    if fused is not None and is_power_of_two is not None:
        total, normed, (codes, scales) = fused(x, delta, *norm, is_power_of_two)
        return total, normed, Fp8Rows(codes, scales, x.dtype)
    if isinstance(delta, Summands):
        delta = delta.total()
    if delta is None:
        return x, ops.rms_norm(x, *norm), None
    return *add_rms_norm(ops, x, delta, *norm), None


def rope_rows(ops: Operators, table: RopeTable, axis: RowAxis, is_interleaved: bool) -> RopeRows:
    """The rotations of an axis' rows: RopeTable.at, to the bit."""
    fused = ops.fusions.get("rope_rows")
    if fused is None or table.cos.dtype != torch.float32:
        return table.at(axis, is_interleaved)
    cos, sin = fused(table.cos, table.sin, axis.position, is_interleaved)
    return RopeRows(axis, cos, sin, is_interleaved)


def heads_quantise(
    ops: Operators, x: Tensor, weight: Tensor, is_power_of_two: bool | None
) -> Tensor | Fp8Rows:
    """[R, H * N] of x [R, H, K] and weight [H, K, N], heads of a row side by side.

    In FP8 where one launch gives that (``is_power_of_two`` None: it is not asked for).
    """
    fused = ops.fusions.get("heads_quantise")
    if fused is not None and is_power_of_two is not None:
        codes, scales = fused(x, weight, is_power_of_two)
        return Fp8Rows(codes, scales, x.dtype)
    # Packed: heads lie side by side, as the product that follows reads them.
    return ops.multiply_heads(x, weight, is_packed=True).flatten(1)


def absorb(ops: Operators, x: Tensor, weight: Tensor, room: Tensor | None) -> Tensor:
    """[M, H, N] of x [M, H, K] and weight [H, K, N], in ``room`` where it may be."""
    if room is None or ops.products is not TORCH:
        return ops.multiply_heads(x, weight)
    torch.bmm(x.transpose(0, 1), weight, out=room.transpose(0, 1))
    return room


def sparse_values(
    ops: Operators,
    queries: tuple[RowTensor, RowTensor],
    pool: PagedPool,
    keys: KeySet,
    table: PageTable,
    scale: float,
) -> RowTensor:
    """``out`` of sparse_mla of ``queries`` (latent, rope), for whoever does not read the lse."""
    if not has_values(ops.kernels["sparse_mla"]):
        return ops.sparse_mla(*queries, pool, keys, table, scale).out
    axis = queries[0].axis
    require_axis(axis, q_rope=queries[1], keys=keys)
    held = queries[0].data, queries[1].data
    return RowTensor(axis, attend_values(ops.kernels, held, pool, keys, table, scale, ops.unpacked))


def linear_parts(ops: Operators, x: Fp8Rows, weight: BlockFp8Weight) -> Tensor | Summands:
    """linear_fp8; the sum over splits of K, if there are any, is left to the norm that reads it."""
    fused = ops.fusions.get("linear_fp8_parts")
    if fused is None:
        return ops.linear_fp8(x, weight)
    found: Tensor | Summands = fused(x.codes, x.scales, weight.codes, weight.scales, x.dtype)
    return found


def may_stack(ops: Operators) -> bool:
    """Whether FP8 products of one input may be one: by kernels whose bits may hang on its width."""
    return "linear_fp8_parts" in ops.fusions and not ops.products.is_fixed


def moe_parts(
    ops: Operators,
    x: Fp8Rows,
    pairs: tuple[Tensor, Tensor],
    gate_up: BlockFp8Weight,
    down: BlockFp8Weight,
) -> Tensor | Summands:
    """moe_fp8 of ``pairs`` (expert ids, weights), the experts' shares left to the norm."""
    fused = ops.fusions.get("moe_fp8_parts")
    if fused is None:
        return ops.moe_fp8(x, *pairs, gate_up, down)
    weights = (gate_up.codes, gate_up.scales), (down.codes, down.scales)
    found: Tensor | Summands = fused(
        (x.codes, x.scales), *pairs, *weights, down.is_power_of_two, x.dtype
    )
    return found


def route_experts(
    ops: Operators,
    given: tuple[Tensor, Tensor, Tensor | None],
    rule: RouterRule,
    want_margin: bool,
) -> Routing:
    """Routing of ``given`` (logits, bias, request), to the rounding of a sigmoid and a sum."""
    chosen: Routing = ops.fusions.get("route_experts", route)(*given, rule, want_margin)
    return chosen


def index_products(
    ops: Operators, x: Tensor, key: Tensor | None, parts: Tensor, num_heads: int
) -> tuple[Tensor | None, Tensor | None]:
    """(x · keyᵀ [M, Di], x · (sum of parts [P * Hi, K])ᵀ [M, Hi] fp32) of x [M, K].

    Without a key its product is None. Both are None where no launch gives them: then they are
    products of their own.
    """
    fused = ops.fusions.get("index_products")
    if fused is None:
        return None, None
    both: tuple[Tensor | None, Tensor] | None = fused(x, key, parts, num_heads)
    return (None, None) if both is None else both


def route_products(
    ops: Operators,
    x: Tensor,
    parts: Tensor,
    given: tuple[Tensor, Tensor | None],
    rule: RouterRule,
) -> Routing | None:
    """Routing by the logits x · (sum of parts [P * E, K])ᵀ, ``given`` (bias, request).

    None where no launch adds the logits up as it chooses: then route_experts takes them.
    """
    fused = ops.fusions.get("route_products")
    if fused is None:
        return None
    chosen: Routing | None = fused(x, parts, *given, rule)
    return chosen


def prepare_attention(
    ops: Operators,
    q_rope: Tensor,
    rope: RopeRows,
    latent: LatentEntry,
    index: IndexEntry | None,
    out: Tensor | None = None,
) -> tuple[Tensor, RowTensor | None]:
    """Write latents and index keys; turn attention queries q_rope [R, H, D_r] and index queries.

    Returns (q_rope turned, index queries turned or None where the layer has no indexer). ``out``:
    where the former goes, if one launch does it all; else it is a tensor of its own.
    """
    name = "prepare_attention" if index is not None else "write_latent_and_rope"
    fused = ops.fusions.get(name)
    if fused is None:
        _write_latent(ops, latent)
        prepared = None
        if index is not None:
            prepared = ops.index_prepare(
                index.query, index.key, index.transform, index.rope, index.pool, index.writes
            )
        return ops.rope(q_rope, rope), prepared
    _require_axes(latent, index)
    written = (
        latent.raw.data,
        latent.norm_weight,
        latent.eps,
        latent.rope,
        latent.pool,
        latent.writes.slots,
    )
    if index is None:
        turned: Tensor = fused(q_rope, rope, written, out=out)
        return turned, None
    indexed = (
        index.query.data,
        index.key.data,
        index.transform,
        index.rope,
        index.pool,
        index.writes.slots,
    )
    turned, query = fused(q_rope, rope, written, indexed, out=out)
    return turned, RowTensor(index.query.axis, query)


def _write_latent(ops: Operators, latent: LatentEntry) -> None:
    ops.latent_write(
        latent.raw, latent.norm_weight, latent.eps, latent.rope, latent.pool, latent.writes
    )


def _require_axes(latent: LatentEntry, index: IndexEntry | None) -> None:
    require_axis(latent.writes.axis, kv_raw=latent.raw, rope=latent.rope)
    if index is not None:
        require_axis(index.writes.axis, k_raw=index.key, key_rope=index.rope[1])
        require_axis(index.query.axis, query_rope=index.rope[0])
