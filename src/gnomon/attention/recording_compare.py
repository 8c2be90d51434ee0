"""Compare what a kernel gave with what was recorded, by the tolerance of the operator's spec.

In:  two sets of results by name, the recorded call.
Out: Comparison: equal to the bit or not, the largest difference and its share of what is allowed,
     and the first row that passes it, with the head and the numbers.
What is allowed: twice the spec's tolerance for the call's dtype (absolute + relative * |expected|),
since each of the two results may be off by it; the reference too rounds its result to the dtype.
The absolute part is meant for numbers of unit size; where a row's largest number is above 1, it
grows with it. Entries of a cache are compared as numbers, and may differ by one step of their
format on top.
Not here: running kernels (recording_replay.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnomon.attention.layouts.base import KVLayout
from gnomon.attention.ops.values import RopeRows
from gnomon.attention.recording import PoolPart, RecordedCall
from gnomon.attention.recording_calls import SHAPES, WRITTEN
from gnomon.attention.spec import SPECS, Tolerance
from gnomon.attention.spec.model import EXACT


@dataclass(frozen=True, slots=True)
class Difference:
    """One number that is further off than allowed; or, in ``note``, what cannot be compared.

    ``row`` counts in the call, ``step_row`` in the step (None where unknown); ``index`` is the
    place in the result called ``name``.
    """

    name: str
    note: str = ""
    index: tuple[int, ...] = ()
    row: int | None = None
    step_row: int | None = None
    head: int | None = None
    expected: float = 0.0
    found: float = 0.0
    difference: float = math.inf
    allowed: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """``share``: the largest difference as a share of what is allowed there; above 1 is wrong."""

    is_equal: bool
    worst: float
    share: float
    first: Difference | None = None

    @property
    def is_ok(self) -> bool:
        """Whether no number is further off than allowed."""
        return self.share <= 1.0


def compare_results(
    call: RecordedCall, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Comparison:
    """All results of one call."""
    total = Comparison(True, 0.0, 0.0)
    for name in expected:
        if name not in found:
            return Comparison(False, math.inf, math.inf, Difference(name, "is missing"))
        one = _compare(call, name, found[name].cpu(), expected[name].cpu())
        total = Comparison(
            total.is_equal and one.is_equal,
            max(total.worst, one.worst),
            max(total.share, one.share),
            total.first or one.first,
        )
    return total


def tolerance_of(call: RecordedCall, name: str) -> Tolerance:
    """The spec's tolerance for a result of this call."""
    spec = SPECS[call.op]
    return EXACT if name in spec.exact else spec.tolerances[compute_dtype(call)]


def compute_dtype(call: RecordedCall) -> torch.dtype:
    """The dtype that a call computes in: that of its first float operand."""
    for value in call.arguments:
        if isinstance(value, PoolPart):
            return value.layout.computed_dtype
        tensor = value.cos if isinstance(value, RopeRows) else value
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return tensor.dtype
    return torch.float32


def _compare(call: RecordedCall, name: str, found: Tensor, expected: Tensor) -> Comparison:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        note = (
            f"is {found.dtype} {list(found.shape)}, recorded is {expected.dtype} "
            f"{list(expected.shape)}"
        )
        return Comparison(False, math.inf, math.inf, Difference(name, note))
    if expected.numel() == 0 or _same_bytes(found, expected):
        return Comparison(True, 0.0, 0.0)
    step = torch.zeros(())
    if name == WRITTEN:
        layout = _layout(call)
        found, expected = layout.dequantise(found), layout.dequantise(expected)
        step = 2 * layout.round_trip_bound(expected)  # two neighbours of the format
    allowed = 2 * _allowed(tolerance_of(call, name), expected) + step
    truth, actual = expected.double(), found.double()
    is_same = (actual == truth) | (actual.isnan() & truth.isnan())
    difference = (actual - truth).abs()
    # A wrong infinity or NaN has no finite difference; equal infinities have none at all.
    difference = difference.masked_fill(~difference.isfinite(), math.inf).masked_fill(is_same, 0.0)
    share = torch.where(difference == 0, difference, difference / allowed)
    first = None
    if bool((share > 1).any()):
        row = int((share > 1).flatten(1).any(1).nonzero()[0]) if share.dim() > 1 else None
        first = _place(call, name, row, share)
        at = first.index
        first = replace(
            first,
            expected=float(truth[at]),
            found=float(actual[at]),
            difference=float(difference[at]),
            allowed=float(allowed.expand_as(share)[at]),
        )
    return Comparison(False, float(difference.max()), float(share.max()), first)


def _place(call: RecordedCall, name: str, row: int | None, share: Tensor) -> Difference:
    """Where the first wrong row differs most. A result of one dim has its rows in it."""
    if row is None:
        row = int((share > 1).nonzero()[0])
        index: tuple[int, ...] = (row,)
    else:
        within = torch.unravel_index(share[row].argmax(), share.shape[1:])
        index = (row, *(int(place) for place in within))
    shape = SHAPES[call.op]
    is_headed = shape.has_heads and name != WRITTEN and (name == "lse" or share.dim() > 2)
    rows = call.rows.get(shape.group_of(name))
    return Difference(
        name=name,
        index=index,
        row=row,
        step_row=None if rows is None or row >= rows.shape[0] else int(rows[row]),
        head=index[1] if is_headed and len(index) > 1 else None,
    )


def _allowed(tolerance: Tolerance, expected: Tensor) -> Tensor:
    """Float64: absolute * (the row's largest number, at least 1) + relative * |expected|."""
    size = expected.double().abs().nan_to_num(0.0, 0.0, 0.0)
    scale = size.flatten(1).amax(1) if size.dim() > 1 else size
    scale = scale.clamp_min(1.0).view(-1, *(1,) * (size.dim() - 1))
    return tolerance.absolute * scale + tolerance.relative * size


def _layout(call: RecordedCall) -> KVLayout:
    place = SHAPES[call.op].pool
    assert place is not None
    part: PoolPart = call.arguments[place]
    return part.layout


def _same_bytes(found: Tensor, expected: Tensor) -> bool:
    both = (t.contiguous().view(-1).view(torch.uint8) for t in (found, expected))
    return torch.equal(*both)
