"""Comparison of recomputed rows, with bounds that follow from the sizes of the numbers.

In:  results of a kernel, the same rows recomputed in float64, and how far they may lie apart.
Out: faults. Bounds: a sum of n products in a dtype of epsilon u is off by at most n·u times the
sum of magnitudes and typically by √n·u; SLACK covers √n for n up to 1000. Bounds by norms, not by
values, so that cancellation is no false alarm. Not here: the recomputation (recheck_*.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnomon.attention.checks.faults import Fault, Faults, Rule

SLACK = 32.0
LN2 = math.log(2.0)


def sum_error(dtype: torch.dtype) -> float:
    """Relative error allowed to sums that are formed in fp32, or in fp64 for fp64 values."""
    wide = dtype if dtype == torch.float64 else torch.float32
    return SLACK * torch.finfo(wide).eps


def rounding(dtype: torch.dtype) -> float:
    """Relative error of a result in ``dtype``: two roundings, as where weights are rounded too."""
    return torch.finfo(dtype).eps


def is_far(found: Tensor, expected: Tensor, allowed: Tensor | float) -> Tensor:
    """Bool per number: not equal (NaN equals NaN) and further apart than allowed."""
    found = found.double()
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    return ~(is_same | ((found - expected).abs() <= allowed))


def value_fault(
    name: str, rows: list[int], found: Tensor, expected: Tensor, allowed: Tensor | float
) -> Faults:
    """Fault of the recomputed ``rows`` of result ``name`` that lie too far from the reference."""
    far = is_far(found, expected, allowed)
    if not bool(far.any()):
        return
    bad = [index for index in range(len(rows)) if bool(far[index].any())]

    def detail(row: int) -> str:
        index = rows.index(row)
        at = tuple(far[index].nonzero()[0].tolist())
        place = name if not at else f"{name}{list(at)}"
        limit = allowed.expand(far.shape)[index][at] if isinstance(allowed, Tensor) else allowed
        return (
            f"{place} is {float(found[index][at]):.7g}, the reference gives "
            f"{float(expected[index][at]):.7g}; {float(limit):.2g} apart is allowed"
        )

    yield Fault(Rule.VALUE, tuple(rows[index] for index in bad), detail)


def lse_fault(rows: list[int], found: Tensor, expected: Tensor, allowed: Tensor) -> Faults:
    """Fault of rows whose lse [m, H] is not the natural log; says so if it fits base 2."""
    far = is_far(found, expected, allowed)
    if not bool(far.any()):
        return
    bad = [index for index in range(len(rows)) if bool(far[index].any())]

    def detail(row: int) -> str:
        index = rows.index(row)
        head = int(far[index].nonzero()[0, 0])
        got, truth = float(found[index, head]), float(expected[index, head])
        is_binary = not bool(is_far(found[index] * LN2, expected[index], allowed[index]).any())
        hint = "; it is the log to base 2: multiply it by ln 2" if is_binary else ""
        return f"head {head} has {got:.7g}, the reference gives {truth:.7g}{hint}"

    yield Fault(Rule.LSE, tuple(rows[index] for index in bad), detail)
