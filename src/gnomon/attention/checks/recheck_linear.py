"""Recomputation of sampled rows of the FP8 operators.

In:  a call's arguments and results, the rows to look at. Out: faults. Maths: oracle_math.md §4.1,
by the reference provider. Codes of plain rows have to be equal, those of silu may be the next. A
product is recomputed over as many output columns as the effort's numbers allow.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import GROUP, dequantised_rows
from gnomon.attention.checks.compare import rounding, value_fault
from gnomon.attention.checks.effort import Effort
from gnomon.attention.checks.faults import Faults
from gnomon.attention.providers import reference
from gnomon.attention.spec.model import Arguments

ONE_CODE = 2.0**-3  # from a code to the next one
COARSE_SUM = 2.0**-9  # FP8 tensor cores keep some 14 bits of a sum


def recheck_quantise_rows(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Quantise the rows again: equal codes and scales."""
    x, is_power_of_two = arguments
    codes, scales = reference.quantise_rows(x[rows], is_power_of_two)
    yield from value_fault("scales", rows, results["scales"][rows], scales.double(), 0.0)
    found = results["codes"].view(torch.uint8)[rows]
    yield from value_fault("codes", rows, found, codes.view(torch.uint8).double(), 0.0)


def recheck_silu_quantise(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Activate and quantise the rows again."""
    hidden, is_power_of_two = arguments
    codes, scales = reference.silu_quantise(hidden[rows], is_power_of_two)
    expected = dequantised_rows(codes, scales, torch.float64)
    found_codes = results["codes"].view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    found = dequantised_rows(found_codes, results["scales"][rows], torch.float64)
    least = scales.double().amax(-1, keepdim=True) * 2.0**-8  # a step among the smallest codes
    yield from value_fault("values", rows, found, expected, ONE_CODE * expected.abs() + least)


def recheck_linear_fp8(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Multiply the rows again by the first rows of the weight."""
    x_codes, x_scales, codes, scales, dtype = arguments
    columns = min(codes.shape[0], max(1, effort.numbers // max(1, codes.shape[1])))
    blocks = -(-columns // GROUP)
    picked = _rows(x_codes, rows), x_scales[rows]
    weight = codes[:columns], scales[:blocks]
    wide = torch.float64
    expected = reference.linear_fp8(*picked, *weight, wide)
    size = reference.linear_fp8(_size(picked[0]), picked[1], _size(weight[0]), weight[1], wide)
    allowed = COARSE_SUM * size + rounding(dtype) * expected.abs()
    yield from value_fault("out", rows, results["out"][rows, :columns], expected, allowed)


def recheck_moe_fp8(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Run the rows through their experts again, if their weights are few enough to convert."""
    x, ids, weights, gate_up, down, is_power_of_two, dtype = arguments
    per_row = ids.shape[1] * (gate_up[0][0].numel() + down[0][0].numel())
    rows = rows[: effort.numbers // per_row] if per_row else rows
    if not rows:
        return
    picked = _rows(x[0], rows), x[1][rows]
    rest = (gate_up, down, is_power_of_two, torch.float64)
    expected = reference.moe_fp8(picked, ids[rows], weights[rows], *rest)
    # A hidden value next to a tie moves by one code; a row has few of those.
    allowed = (2.0**-5 + 2 * rounding(dtype)) * expected.abs().amax(-1, keepdim=True)
    yield from value_fault("out", rows, results["out"][rows], expected, allowed + 1e-6)


def _rows(codes: Tensor, rows: list[int]) -> Tensor:
    """Rows of e4m3 codes; a CPU indexes bytes only."""
    return codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn)


def _size(codes: Tensor) -> Tensor:
    return codes.double().abs()
