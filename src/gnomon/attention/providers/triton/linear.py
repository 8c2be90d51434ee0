"""Products of quantised rows with block FP8 weights (W8A8).

In:  codes [M, K] e4m3 and scales [M, groups] of rows, a weight's codes [N, K] and scales
     [ceil(N / 128), ceil(K / 128)], the dtype of the result.
Out: [M, N]. `linear_fp8_fixed`: bits of a row hang on that row alone.
Few rows stream the weight: K is split where columns alone would leave processors idle, and the
parts are added in order by a second kernel, or by the norm that reads the result
(`linear_fp8_parts`). Not here: tile sizes (tiles.py), the kernel
(products.py), quantisation (linear_quantise.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import triton
from torch import Tensor

from gnomon.attention.ops.values import Summands
from gnomon.attention.providers.triton import tiles
from gnomon.attention.providers.triton.attention_tiles import can_launch_early
from gnomon.attention.providers.triton.language import has_native_fp8
from gnomon.attention.providers.triton.linear_quantise import (
    as_operand,
    quantise_rows,
    silu_quantise,
)
from gnomon.attention.providers.triton.products import add_splits, multiply
from gnomon.attention.providers.triton.tiles import Tile


def linear_fp8(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """[M, N] of ``dtype``; x_codes [M, K], codes [N, K]."""
    tile = _usual_tile(x_codes, codes)
    return run_linear((x_codes, x_scales), (codes, scales), dtype, tile)


def linear_fp8_fixed(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """The same; a row's bits do not hang on M."""
    tile = _fixed_tile(x_codes, codes)
    return run_linear((x_codes, x_scales), (codes, scales), dtype, tile)


def linear_fp8_parts(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor | Summands:
    """linear_fp8, or its parts where K is split."""
    tile = _usual_tile(x_codes, codes)
    return _unsummed((x_codes, x_scales), (codes, scales), dtype, tile)


def linear_fp8_parts_fixed(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor | Summands:
    """linear_fp8_fixed, or its parts."""
    tile = _fixed_tile(x_codes, codes)
    return _unsummed((x_codes, x_scales), (codes, scales), dtype, tile)


def _usual_tile(x_codes: Tensor, codes: Tensor) -> Tile:
    kind = tiles.kind_of(codes.device)
    return tiles.linear_tile(x_codes.shape[0], codes.shape[0], codes.shape[1], kind)


def _fixed_tile(x_codes: Tensor, codes: Tensor) -> Tile:
    are_equal, kind = tiles.has_equal_tiles(codes.device, codes.dtype), tiles.kind_of(codes.device)
    shape = x_codes.shape[0], codes.shape[0], codes.shape[1]
    return tiles.fixed_linear_tile(*shape, are_equal, kind)


def _unsummed(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], dtype: torch.dtype, tile: Tile
) -> Tensor | Summands:
    if tile.splits == 1 or x[0].shape[0] == 0:
        return run_linear(x, weight, dtype, tile)
    parts = _parts(x, weight, tile)

    def total() -> Tensor:
        out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
        _add(parts, out, is_early=False)
        return out

    return Summands(parts, dtype, None, total)


def run_linear(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], dtype: torch.dtype, tile: Tile
) -> Tensor:
    """The product with given tile sizes (for tuning and tests)."""
    shape = x[0].shape[0], weight[0].shape[0]
    out = torch.empty(shape, dtype=dtype, device=weight[0].device)
    _multiply_into(x, weight, out, tile)
    return out


def linear_into(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor) -> None:
    """linear_fp8 into out [M, N], contiguous."""
    tile = _usual_tile(x[0], weight[0])
    _multiply_into(x, weight, out, tile)


def _multiply_into(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor, tile: Tile
) -> None:
    if out.numel() == 0:
        return
    if tile.splits == 1:
        _launch(x, weight, out, tile, is_early=False)
        return
    is_early = can_launch_early(out.device)
    _add(_parts(x, weight, tile, is_early), out, is_early)


def _parts(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], tile: Tile, is_early: bool = False
) -> Tensor:
    """[splits, M, N] fp32: the products of each part of K."""
    shape = (tile.splits, x[0].shape[0], weight[0].shape[0])
    parts = torch.empty(shape, dtype=torch.float32, device=weight[0].device)
    _launch(x, weight, parts, tile, is_early)
    return parts


def _launch(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    into: Tensor,
    tile: Tile,
    is_early: bool,
) -> None:
    x_codes, x_scales = x
    codes, scales = weight
    num_rows, num_columns, width = x_codes.shape[0], codes.shape[0], codes.shape[1]
    is_native = has_native_fp8(codes.device)
    num_m = triton.cdiv(num_rows, tile.rows)
    per_split = triton.cdiv(triton.cdiv(width, tile.depth), tile.splits) * tile.depth
    grid = (num_m * triton.cdiv(num_columns, tile.columns), tile.splits)
    multiply[grid](
        as_operand(x_codes, is_native), x_scales, as_operand(codes, is_native), scales,
        x_scales, into, x_scales, x_scales, x_scales, x_scales,
        num_rows, num_columns, width, per_split, num_m,
        x_codes.stride(0), x_scales.stride(0), x_scales.stride(1),
        0, codes.stride(0), 0, scales.stride(0),
        num_rows * num_columns, num_columns, 0, 0,
        1, tile.rows, tile.columns, tile.depth, tile.group,
        tile.splits > 1, tile.is_swapped, False, False, True, is_native, False,
        width % tile.depth == 0, False, tile.stages, is_early, 1,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _add(parts: Tensor, out: Tensor, is_early: bool) -> None:
    """Out [M, N] = the sum of parts; ``is_early``: launched before they are all there."""
    splits, num_rows, num_columns = parts.shape
    block = 1024
    add_splits[(num_rows, triton.cdiv(num_columns, block))](
        parts, out, num_rows, num_columns, splits, block, is_early,
        **({"launch_pdl": True} if is_early else {}),
    )  # fmt: skip


KERNELS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "quantise_rows": quantise_rows,
        "silu_quantise": silu_quantise,
        "linear_fp8": linear_fp8,
    }
)
FIXED: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {"linear_fp8": linear_fp8_fixed, "linear_fp8_parts": linear_fp8_parts_fixed}
)
FUSIONS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {"linear_fp8_parts": linear_fp8_parts}
)
