"""Rules for index lists: ids and counts of every row, whoever made them.

In:  ids [R, W] (int32 or int64), count [R], bounds. Out: faults, nothing if the lists are sound.
A list's first count[r] ids are valid and -1 follows (design.md §5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.checks.faults import Faults, Rule, fault_where

SHOWN = 8


def list_faults(ids: Tensor, count: Tensor, bounds: tuple[int, Tensor | int]) -> Faults:
    """Counts within the width, -1 behind them, and bounds[0] <= valid ids < bounds[1]."""
    low, high = bounds
    limit = high[:, None] if isinstance(high, Tensor) else high
    width = ids.shape[1]
    columns = torch.arange(width, device=ids.device)
    is_valid = columns < count[:, None]
    is_inside = (ids >= low) & (ids < limit)
    is_good = torch.where(is_valid, is_inside, ids == -1).all()
    if bool(is_good & (count >= 0).all() & (count <= width).all()):
        return

    def shown(row: int) -> str:
        return describe_list(ids, count, row)

    yield from fault_where((count < 0) | (count > width), Rule.COUNT, shown)
    yield from fault_where((~is_valid & (ids != -1)).any(1), Rule.TAIL, shown)
    outside = (is_valid & ~is_inside).any(1)

    def allowed(row: int) -> str:
        top = int(high[row]) if isinstance(high, Tensor) else high
        return f"{shown(row)}; allowed are {low} .. {top - 1}"

    yield from fault_where(outside, Rule.RANGE, allowed)


def order_faults(ids: Tensor, count: Tensor, is_sorted: bool) -> Faults:
    """Valid ids ascend strictly (``is_sorted``), or at least differ."""
    is_valid = torch.arange(ids.shape[1], device=ids.device) < count[:, None]
    ordered = ids
    if not is_sorted:
        ordered = ids.masked_fill(~is_valid, torch.iinfo(ids.dtype).max).sort(dim=1).values
    falls = (is_valid[:, 1:] & (ordered[:, 1:] <= ordered[:, :-1])).any(1)

    def shown(row: int) -> str:
        values = ordered[row, : int(count[row])]
        at = int((values[1:] <= values[:-1]).nonzero()[0, 0])
        return f"id {int(values[at])} is followed by {int(values[at + 1])}, at place {at + 1}"

    yield from fault_where(falls, Rule.ORDER if is_sorted else Rule.SLOT_ONCE, shown)


def count_faults(count: Tensor, expected: Tensor, what: str) -> Faults:
    """Each row's count is exactly ``expected``; ``what`` says how that number comes about."""
    yield from fault_where(
        count != expected,
        Rule.COUNT,
        lambda row: f"count is {int(count[row])}, {what} is {int(expected[row])}",
    )


def describe_list(ids: Tensor, count: Tensor, row: int) -> str:
    """A row's count and its first ids, for people."""
    dots = ", ..." if ids.shape[1] > SHOWN else ""
    return f"count {int(count[row])}, ids {str(ids[row, :SHOWN].tolist())[:-1]}{dots}]"
