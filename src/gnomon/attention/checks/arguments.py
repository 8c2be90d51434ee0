"""What is asked of the arguments of an operator's call: counts, lists, slots, pages, experts.

In:  the arguments. Out: faults, each naming its rows (design.md §3 and §5). One function a rule;
which operator has which is in rules.py, what holds for all alike in results.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.checks.faults import Fault, Faults, Rule, fault_where
from gnomon.attention.checks.lists import list_faults, order_faults
from gnomon.attention.spec.model import Arguments


def attention_lists(arguments: Arguments) -> Faults:
    """Slots of sparse_mla: in range, each once, none behind the count."""
    _, _, pool, slots, count, _ = arguments
    yield from list_faults(slots, count, (pool.page_size, pool.num_slots))
    yield from order_faults(slots, count, is_sorted=False)


def visible(arguments: Arguments) -> Faults:
    """Counts of dense_mha: of its keys."""
    _, k, _, visible, _ = arguments
    yield from within(visible, int(k.shape[0]))


def score_counts(arguments: Arguments) -> Faults:
    """Counts of index_scores: of its keys."""
    yield from within(arguments[3], int(arguments[2].shape[0]))


def page_counts(arguments: Arguments) -> Faults:
    """Counts and pages of index_scores_paged."""
    _, _, pool, pages, count, _ = arguments
    yield from within(count, int(pages.shape[1]) * pool.page_size)
    needed = -(-count // pool.page_size)
    used = torch.arange(pages.shape[1], device=pages.device) < needed[:, None]
    bad = (used & ((pages < 1) | (pages >= pool.num_pages))).any(1)
    yield from fault_where(
        bad,
        Rule.RANGE,
        lambda row: f"pages {pages[row, :8].tolist()}; allowed are 1 .. {pool.num_pages - 1}",
    )


def topk_counts(arguments: Arguments) -> Faults:
    """Counts of topk, and -inf behind them."""
    scores, count = arguments[:2]
    yield from within(count, int(scores.shape[1]))
    yield from hidden_columns(scores, count)


def within(count: Tensor, most: int) -> Faults:
    """Counts that are below 0 or above ``most``."""
    yield from fault_where(
        (count < 0) | (count > most),
        Rule.COUNT,
        lambda row: f"count is {int(count[row])}, allowed are 0 .. {most}",
    )


def hidden_columns(scores: Tensor, count: Tensor) -> Faults:
    """Scores behind the count that are not -inf."""
    hidden = torch.arange(scores.shape[1], device=scores.device) >= count[:, None]
    bad = (hidden & (scores != -torch.inf)).any(1)
    yield from fault_where(
        bad, Rule.SILENT, lambda row: f"a column from {int(count[row])} on is not -inf"
    )


def write_slots(arguments: Arguments) -> Faults:
    """Slots that are written: in range, none twice."""
    pool, slots = arguments[4], arguments[5]
    low, high = pool.page_size, pool.num_slots
    bad = (slots < -1) | ((slots >= 0) & (slots < low)) | (slots >= high)
    for fault in fault_where(
        bad,
        Rule.SLOT_RANGE,
        lambda row: f"slot {int(slots[row])}; allowed are -1 and {low} .. {high - 1}",
    ):
        yield _of_writes(fault, is_contained=False)
    written = slots[slots >= 0]
    if torch.unique(written).numel() < written.numel():
        order = slots.argsort(stable=True)
        ordered = slots[order]
        again = torch.zeros_like(slots, dtype=torch.bool)
        again[order[1:]] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
        for fault in fault_where(again, Rule.SLOT_ONCE, lambda row: f"slot {int(slots[row])}"):
            yield _of_writes(fault, is_contained=False)


def _of_writes(fault: Fault, is_contained: bool) -> Fault:
    return Fault(fault.rule, fault.rows, fault.detail, is_contained, is_of_writes=True)


def gather_range(arguments: Arguments) -> Faults:
    """Pages of context_gather."""
    pool, pages, start, length = arguments
    position = torch.arange(start, start + length, device=pages.device)
    page = pages[(position // pool.page_size).clamp_max(max(pages.shape[0] - 1, 0))]
    bad = (page < 1) | (page >= pool.num_pages)
    yield from fault_where(
        bad,
        Rule.RANGE,
        lambda row: (
            f"entry {start + row} is on page {int(page[row])}; allowed are 1 .. "
            f"{pool.num_pages - 1}"
        ),
    )


def experts(arguments: Arguments) -> Faults:
    """Experts of moe: in range, none twice in a row."""
    yield from _named_experts(arguments[1], int(arguments[3].shape[0]))


def experts_fp8(arguments: Arguments) -> Faults:
    """The same of moe_fp8, whose weights are codes and scales."""
    yield from _named_experts(arguments[1], int(arguments[3][0].shape[0]))


def _named_experts(ids: Tensor, num_experts: int) -> Faults:

    def shown(row: int) -> str:
        return f"experts {ids[row].tolist()}; allowed are -1 .. {num_experts - 1}"

    yield from fault_where(((ids < -1) | (ids >= num_experts)).any(1), Rule.RANGE, shown)
    ordered = ids.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    yield from fault_where(
        twice, Rule.ORDER, lambda row: f"experts {ids[row].tolist()} name one twice"
    )
