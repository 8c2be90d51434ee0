"""Arguments of the operators of FP8 weights at real sizes: quantisers, linears, experts.

In:  sizes, where and what to draw (op_inputs.Material). Out: the positional arguments of a call.
Scales are those of published checkpoints that hold any float32, not powers of two.
Not here: which sizes (op_cells.py); edge cases (attention/spec/linear.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import num_groups
from gnomon.attention.layouts.float8 import E4M3_MAX
from gnomon.attention.spec.model import Arguments
from gnomon.bench.op_inputs import Material, choices

SPREAD = 100.0  # of codes, whose largest is 448


def quantise_rows(draw: Material, num_rows: int, width: int) -> Arguments:
    """Hidden states."""
    return draw.normal(num_rows, width), False


def silu_quantise(draw: Material, num_rows: int, width: int) -> Arguments:
    """Gate and up of a feed-forward of ``width``."""
    return draw.normal(num_rows, 2 * width), False


def linear_fp8(draw: Material, num_rows: int, columns: int, depth: int) -> Arguments:
    """Quantised rows of ``depth`` columns by a weight of ``columns`` outputs."""
    return *_rows(draw, num_rows, depth), *_weight(draw, (columns, depth)), draw.dtype


def moe_fp8(
    draw: Material, num_rows: int, num_experts: int, width: int, hidden: int = 7168
) -> Arguments:
    """Eight of ``num_experts`` for every row; experts in FP8."""
    gate_up = _weight(draw, (num_experts, 2 * width, hidden))
    down = _weight(draw, (num_experts, hidden, width))
    ids, weights = choices(draw, num_rows, num_experts)
    return _rows(draw, num_rows, hidden), ids, weights, gate_up, down, False, draw.dtype


def _codes(draw: Material, *shape: int) -> Tensor:
    drawn = draw.normal(*shape, dtype=torch.bfloat16).mul_(SPREAD)
    return drawn.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _rows(draw: Material, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    scales = torch.rand(
        num_rows, num_groups(width), generator=draw.generator, device=draw.device
    ).add_(1)
    return _codes(draw, num_rows, width), scales / SPREAD


def _weight(draw: Material, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes and block scales of a weight of about unit gain."""
    *lead, rows, columns = shape
    grid = (*lead, num_groups(rows), num_groups(columns))
    scales = torch.rand(grid, generator=draw.generator, device=draw.device).add_(1)
    return _codes(draw, *shape), scales * columns**-0.5 / SPREAD
