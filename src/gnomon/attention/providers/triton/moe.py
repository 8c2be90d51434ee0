"""Mixture of experts: pairs sorted by expert, two grouped products, a sum in fixed order.

In:  x [R, D] (or its codes and scales), expert ids [R, k] (−1 adds nothing) and weights; weights of
     the experts [E, 2 I, D] (gate rows first) and [E, D, I], plain or block FP8.
Out: [R, D]: fp32 sums inside; each expert's share is rounded to the result's dtype before the k
     shares of a row are added in fp32 in their order. Nothing waits for the host.
`moe_fixed`, `moe_fp8_fixed`: a row's bits hang on that row alone.
Maths: oracle_math.md §1.7, §4.1. Not here: routing, shared experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.ops.values import Summands
from gnomon.attention.providers.triton import tiles
from gnomon.attention.providers.triton.language import has_native_fp8, padded, round_to
from gnomon.attention.providers.triton.linear_quantise import as_operand, empty_rows, silu_quantise
from gnomon.attention.providers.triton.moe_sort import ExpertBlocks, sort_by_expert
from gnomon.attention.providers.triton.products import multiply
from gnomon.attention.providers.triton.tiles import MoeTiles, Tile

Codes = tuple[Tensor, Tensor]
Fp8Mixture = Callable[[Codes, Tensor, Tensor, Codes, Codes, bool, torch.dtype], Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a product's input, and scales [M, groups] where they are codes."""

    values: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A weight of every expert [E, N, K], and scales [E, ., .] where it is codes."""

    values: Tensor
    scales: Tensor | None = None


@triton.jit
def add_shares(
    parts, ids, out, num_experts_per_row, width, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Out [R, width] = Σ_j parts [R * k, width] over places with an expert, first to last."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(K):
        pair = row * num_experts_per_row + place
        is_named = tl.load(ids + pair) >= 0
        share = tl.load(parts + pair * width + at, mask=is_in & is_named, other=0.0)
        total += share.to(tl.float32)
    tl.store(out + row * width + at, round_to(total, out.dtype.element_ty), mask=is_in)


def moe(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """[R, D] in x's dtype."""
    chosen = usual_tiles(expert_ids.numel(), down)
    return run_moe(x, (expert_ids, expert_weights), gate_up, down, chosen)


def moe_fixed(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """The same; a row's bits do not hang on R."""
    chosen = fixed_tiles(expert_ids.numel(), down)
    return run_moe(x, (expert_ids, expert_weights), gate_up, down, chosen)


def usual_tiles(num_pairs: int, down: Tensor) -> MoeTiles:
    """Tiles by the number of pairs; ``down``: plain numbers or e4m3 codes."""
    return tiles.moe_tiles(num_pairs, down, _is_fp8(down), tiles.kind_of(down.device))


def fixed_tiles(num_pairs: int, down: Tensor) -> MoeTiles:
    """The same for bits that do not hang on that number."""
    are_equal = tiles.has_equal_tiles(down.device, down.dtype)
    kind = tiles.kind_of(down.device)
    return tiles.fixed_moe_tiles(num_pairs, down, _is_fp8(down), are_equal, kind)


def _is_fp8(weight: Tensor) -> bool:
    return weight.dtype == torch.float8_e4m3fn


def _of_codes(choose: Callable[[int, Tensor], MoeTiles], run: Callable[..., Any]) -> Fp8Mixture:
    """A kernel that takes what moe_fp8 does; ``run``: run_moe_fp8, or parts of it."""

    def mixture(
        x: Codes,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Codes,
        down: Codes,
        is_power_of_two: bool,
        dtype: torch.dtype,
    ) -> Any:
        chosen = choose(expert_ids.numel(), down[0])
        pairs = expert_ids, expert_weights
        return run(x, pairs, (gate_up, down), (is_power_of_two, dtype), chosen)

    return mixture


def run_moe(
    x: Tensor, pairs: Codes, gate_up: Tensor, down: Tensor, chosen: MoeTiles
) -> Tensor:  # fmt: skip
    """With given tiles (for tuning and tests)."""
    expert_ids, shares = pairs
    num_pairs, (_, hidden_size, width) = expert_ids.numel(), down.shape
    if x.numel() == 0 or num_pairs == 0:
        return torch.zeros_like(x)
    x = x if x.stride(1) == 1 else x.contiguous()
    blocks = sort_by_expert(expert_ids, down.shape[0], chosen.fused.rows)
    hidden = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)
    k = expert_ids.shape[1]
    grouped(Rows(x), Experts(gate_up), blocks, chosen.fused, Into(hidden, k, is_fused=True))
    grouped(Rows(hidden), Experts(down), blocks, chosen.down, Into(parts, 1, shares=shares))
    return _added(parts, expert_ids, torch.empty_like(x))


def run_unsummed(
    x: Codes,
    pairs: Codes,
    weights: tuple[Codes, Codes],
    kind: tuple[bool, torch.dtype],
    chosen: MoeTiles,
) -> Tensor | Summands:
    """run_moe_fp8, the experts' shares not yet added."""
    ids, width = pairs[0].contiguous(), weights[1][0].shape[1]
    num_rows, k = ids.shape
    if ids.numel() == 0 or width == 0:
        return torch.zeros(num_rows, width, dtype=kind[1], device=ids.device)
    shares = _shares_fp8(x, (ids, pairs[1]), weights, kind, chosen)
    by_place = shares.view(num_rows, k, width).transpose(0, 1)
    total = lambda: _added(shares, ids, shares.new_empty(num_rows, width))  # noqa: E731
    return Summands(by_place, kind[1], ids, total)


def run_moe_fp8(
    x: Codes,
    pairs: Codes,
    weights: tuple[Codes, Codes],
    kind: tuple[bool, torch.dtype],
    chosen: MoeTiles,
) -> Tensor:
    """With given tiles; ``kind``: whether scales are powers of two, the dtype of the result."""
    out = torch.empty(x[0].shape[0], weights[1][0].shape[1], dtype=kind[1], device=x[0].device)
    if out.numel() == 0 or pairs[0].numel() == 0:
        return out.zero_()
    return _added(_shares_fp8(x, pairs, weights, kind, chosen), pairs[0], out)


def _shares_fp8(
    x: Codes,
    pairs: Codes,
    weights: tuple[Codes, Codes],
    kind: tuple[bool, torch.dtype],
    chosen: MoeTiles,
) -> Tensor:
    """[R * k, D]: weighted, what each expert gives its rows; unwritten where there is none."""
    (expert_ids, shares), (gate_up, down) = pairs, weights
    is_power_of_two, dtype = kind
    num_pairs, (num_experts, hidden_size, width) = expert_ids.numel(), down[0].shape
    blocks = sort_by_expert(expert_ids, num_experts, chosen.fused.rows)
    k, device = expert_ids.shape[1], x[0].device
    if chosen.is_split:
        both = torch.empty(num_pairs, 2 * width, dtype=torch.float32, device=device)
        grouped(Rows(*x), Experts(*gate_up), blocks, chosen.fused, Into(both, k))
        active = silu_quantise(both, is_power_of_two)
    else:
        active = empty_rows(num_pairs, width, device)
        into = Into(active[0], k, active[1], is_fused=True, is_power_of_two=is_power_of_two)
        grouped(Rows(*x), Experts(*gate_up), blocks, chosen.fused, into)
    parts = torch.empty(num_pairs, hidden_size, dtype=dtype, device=device)
    grouped(Rows(*active), Experts(*down), blocks, chosen.down, Into(parts, 1, shares=shares))
    return parts


@dataclass(frozen=True, slots=True)
class Into:
    """Where a grouped product goes: a row of ``out`` for every pair.

    ``top_k``: pairs of a row of the input; 1 where input rows are pairs. ``is_fused``: out is the
    activation, half as wide as the weight, and where that is FP8 has ``scales``.
    """

    out: Tensor
    top_k: int
    scales: Tensor | None = None
    shares: Tensor | None = None
    is_fused: bool = False
    is_power_of_two: bool = False


def grouped(x: Rows, weight: Experts, blocks: ExpertBlocks, tile: Tile, into: Into) -> None:
    """One launch over all blocks of rows, each in one tile or a whole number of them."""
    values, out = weight.values, into.out
    is_fp8, is_native = weight.scales is not None, has_native_fp8(values.device)
    scales = values if weight.scales is None else weight.scales
    x_scales = values if x.scales is None else x.scales
    out_scales = values if into.scales is None else into.scales
    num_pairs, num_n = out.shape
    width = values.shape[2]
    per_block = blocks.rows // tile.rows
    num_m = blocks.most * per_block
    grid = (num_m * triton.cdiv(num_n, tile.columns), 1)
    multiply[grid](
        as_operand(x.values, is_native), x_scales, as_operand(values, is_native), scales,
        values if into.shares is None else into.shares,
        out.view(torch.uint8) if out.dtype == torch.float8_e4m3fn else out, out_scales,
        blocks.pairs, blocks.expert, blocks.num_blocks,
        num_pairs, num_n, width, width, num_m,
        x.values.stride(0), x_scales.stride(0), x_scales.stride(1),
        values.stride(0), values.stride(1), scales.stride(0), scales.stride(1),
        0, out.stride(0), out_scales.stride(0), out_scales.stride(1),
        into.top_k, tile.rows, tile.columns, tile.depth, tile.group,
        False, tile.is_swapped, True, into.shares is not None, is_fp8, is_native, into.is_fused,
        width % tile.depth == 0, into.is_power_of_two, tile.stages, False, per_block,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _added(parts: Tensor, expert_ids: Tensor, out: Tensor) -> Tensor:
    num_rows, width = out.shape
    k = expert_ids.shape[1]
    block = min(padded(width), 1024 if num_rows < 512 else 2048)
    add_shares[(num_rows, triton.cdiv(width, block))](
        parts, expert_ids.contiguous(), out, k, width, k, block, num_warps=4
    )
    return out


moe_fp8 = _of_codes(usual_tiles, run_moe_fp8)  # [R, D]; hidden values are quantised from fp32
moe_fp8_fixed = _of_codes(fixed_tiles, run_moe_fp8)
moe_fp8_parts = _of_codes(usual_tiles, run_unsummed)  # shares that the norm which follows adds
moe_fp8_parts_fixed = _of_codes(fixed_tiles, run_unsummed)

KERNELS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {"moe": moe, "moe_fp8": moe_fp8}
)
FIXED: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {"moe": moe_fixed, "moe_fp8": moe_fp8_fixed, "moe_fp8_parts": moe_fp8_parts_fixed}
)
FUSIONS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {"moe_fp8_parts": moe_fp8_parts}
)
