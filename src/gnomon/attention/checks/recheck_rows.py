"""Recomputation of sampled rows of the row-wise operators: norms, rotation, experts.

In:  a call's arguments and results, the rows to look at. Out: faults. Maths: oracle_math.md §1.1,
§1.3 and §1.7, by the reference provider in float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnomon.attention.checks.compare import rounding, sum_error, value_fault
from gnomon.attention.checks.effort import Effort
from gnomon.attention.checks.faults import Faults
from gnomon.attention.ops.values import RopeRows
from gnomon.attention.providers import reference
from gnomon.attention.spec.model import Arguments


def recheck_rms_norm(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Norm the rows again."""
    x, weight, eps = arguments
    expected = reference.rms_norm(x[rows].double(), weight, eps)
    error = sum_error(x.dtype) + rounding(results["out"].dtype)
    yield from value_fault("out", rows, results["out"][rows], expected, error * _size(expected))


def recheck_layer_norm(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Norm the rows again; a mean far from zero costs accuracy in proportion."""
    x, weight, bias, eps = arguments
    part = x[rows].double()
    expected = reference.layer_norm(part, weight, bias, eps)
    spread = (part.var(-1, correction=0, keepdim=True) + eps).sqrt()
    size = _size(part) / spread * weight.double().abs().amax() + bias.double().abs().amax()
    allowed = sum_error(x.dtype) * size + rounding(results["out"].dtype) * _size(expected)
    yield from value_fault("out", rows, results["out"][rows], expected, allowed)


def recheck_rope(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Rotate the rows again."""
    x, turns = arguments
    part = x[rows].double()
    expected = reference.rope(part, rope_at(turns, rows))
    error = sum_error(x.dtype) + rounding(results["out"].dtype)
    yield from value_fault("out", rows, results["out"][rows], expected, error * _size(part))


def recheck_moe(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Run the rows through their experts again, if their weights are few enough to convert."""
    x, ids, weights, gate_up, down = arguments
    per_row = ids.shape[1] * (gate_up[0].numel() + down[0].numel())
    rows = rows[: effort.numbers // per_row] if per_row else rows
    if not rows:
        return
    expected = reference.moe(x[rows].double(), ids[rows], weights[rows], gate_up, down)
    sizes = [_expert_size(x[row], ids[row], weights[row], gate_up, down) for row in rows]
    u = sum_error(x.dtype) + (0.0 if x.dtype == torch.float64 else 2 * rounding(x.dtype))
    yield from value_fault("out", rows, results["out"][rows], expected, u * torch.stack(sizes))


def _expert_size(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[D]: Σ_j |weight| · |down| applied to what one relative error in every product can do."""
    size = torch.zeros(down.shape[1], dtype=torch.float64, device=x.device)
    for expert, weight in zip(ids.tolist(), weights.double().abs(), strict=True):
        if expert < 0:
            continue
        matrix = gate_up[expert].double()
        (gate, up), (gate_size, up_size) = (
            product.chunk(2) for product in (matrix @ x.double(), matrix.abs() @ x.double().abs())
        )
        silu = gate * gate.sigmoid()
        # |d silu| is at most 1.1 |d gate|
        hidden = 1.1 * gate_size * up.abs() + silu.abs() * up_size + (silu * up).abs()
        size += weight * (down[expert].double().abs() @ hidden)
    return size


def rope_at(turns: RopeRows, rows: list[int] | Tensor) -> RopeRows:
    """The rotations of some rows, for the reference, which does not look at the axis."""
    return RopeRows(turns.axis, turns.cos[rows], turns.sin[rows], turns.is_interleaved)


def _size(x: Tensor) -> Tensor:
    """Largest magnitude of every vector: [..., 1]."""
    return x.abs().amax(-1, keepdim=True)
