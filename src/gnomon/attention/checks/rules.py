"""The rules of every operator, in one table: what is asked of arguments, what of results.

In:  the arguments of a call; after it, its results by name. Out: faults.
``before`` looks at what the caller hands over: ids, counts, slots (design.md §3 and §5). ``after``
looks at every row of the results, ``recheck`` at a few rows, recomputed. What holds for all
operators alike (shapes, finite numbers, silent rows) is in results.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gnomon.attention.checks import contract
from gnomon.attention.checks.effort import Effort
from gnomon.attention.checks.faults import Fault, Faults, Rule, fault_where, per_row
from gnomon.attention.checks.lists import count_faults, list_faults, order_faults
from gnomon.attention.checks.recheck_attention import (
    recheck_dense_mha,
    recheck_lse_merge,
    recheck_sparse_mla,
)
from gnomon.attention.checks.recheck_cache import (
    recheck_context_gather,
    recheck_index_prepare,
    recheck_latent_write,
)
from gnomon.attention.checks.recheck_index import (
    judge_topk,
    recheck_index_scores,
    recheck_index_scores_paged,
)
from gnomon.attention.checks.recheck_linear import (
    recheck_linear_fp8,
    recheck_moe_fp8,
    recheck_quantise_rows,
    recheck_silu_quantise,
)
from gnomon.attention.checks.recheck_rows import (
    recheck_layer_norm,
    recheck_moe,
    recheck_rms_norm,
    recheck_rope,
)
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.spec.model import Arguments

Results = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class CallRules:
    """``rowwise``: the float arguments whose dim 0 runs over the rows of the call.

    ``keywise``: likewise over the rows that are written. ``writes``: (pool, slots) among the
    arguments, of operators that write a cache. ``turn``: sparing checks recompute rows of this
    operator in one of effort.TURNS visits; None: in every one.
    """

    outputs: Callable[[Arguments], contract.Outputs]
    silent: contract.Silent
    rowwise: tuple[int, ...]
    recheck: Callable[[Arguments, Results, list[int], Effort], Faults]
    before: Callable[[Arguments], Faults] = lambda _: iter(())
    after: Callable[[Arguments, Results], Faults] = lambda *_: iter(())
    keywise: tuple[int, ...] = ()
    writes: tuple[int, int] | None = None
    turn: int | None = None


def _attention_lists(arguments: Arguments) -> Faults:
    _, _, pool, slots, count, _ = arguments
    yield from list_faults(slots, count, (pool.page_size, pool.num_slots))
    yield from order_faults(slots, count, is_sorted=False)


def _visible(arguments: Arguments) -> Faults:
    _, k, _, visible, _ = arguments
    yield from _within(visible, int(k.shape[0]))


def _score_counts(arguments: Arguments) -> Faults:
    yield from _within(arguments[3], int(arguments[2].shape[0]))


def _page_counts(arguments: Arguments) -> Faults:
    _, _, pool, pages, count, _ = arguments
    yield from _within(count, int(pages.shape[1]) * pool.page_size)
    needed = -(-count // pool.page_size)
    used = torch.arange(pages.shape[1], device=pages.device) < needed[:, None]
    bad = (used & ((pages < 1) | (pages >= pool.num_pages))).any(1)
    yield from fault_where(
        bad,
        Rule.RANGE,
        lambda row: f"pages {pages[row, :8].tolist()}; allowed are 1 .. {pool.num_pages - 1}",
    )


def _topk_counts(arguments: Arguments) -> Faults:
    scores, count = arguments[:2]
    yield from _within(count, int(scores.shape[1]))
    yield from _hidden_columns(scores, count)


def _within(count: Tensor, most: int) -> Faults:
    yield from fault_where(
        (count < 0) | (count > most),
        Rule.COUNT,
        lambda row: f"count is {int(count[row])}, allowed are 0 .. {most}",
    )


def _hidden_columns(scores: Tensor, count: Tensor) -> Faults:
    hidden = torch.arange(scores.shape[1], device=scores.device) >= count[:, None]
    bad = (hidden & (scores != -torch.inf)).any(1)
    yield from fault_where(
        bad, Rule.SILENT, lambda row: f"a column from {int(count[row])} on is not -inf"
    )


def _write_slots(arguments: Arguments) -> Faults:
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


def _gather_range(arguments: Arguments) -> Faults:
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


def _experts(arguments: Arguments) -> Faults:
    yield from _named_experts(arguments[1], int(arguments[3].shape[0]))


def _experts_fp8(arguments: Arguments) -> Faults:
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


def _scored(arguments: Arguments, results: Results) -> Faults:
    scores, count = results["scores"], arguments[-2]
    yield from _hidden_columns(scores, count)
    seen = torch.arange(scores.shape[1], device=scores.device) < count[:, None]
    bad = (seen & ~scores.isfinite()).any(1)
    yield from fault_where(
        bad,
        Rule.FINITE,
        lambda row: "a visible score is not finite: the query, a key in the cache, or the kernel",
    )


def _chosen(arguments: Arguments, results: Results) -> Faults:
    scores, count, k, _ = arguments
    ids, chosen = results["ids"], results["count"]
    yield from count_faults(chosen, count.clamp_max(k), f"the smaller of k = {k} and what is seen")
    yield from list_faults(ids, chosen, (0, count))
    yield from order_faults(ids, chosen, is_sorted=True)
    seen = torch.arange(scores.shape[1], device=scores.device) < count[:, None]
    has_nan = (seen & scores.isnan()).any(1)
    yield from fault_where(
        results["nan_rows"] != has_nan,
        Rule.FLAG,
        lambda row: f"the flag is {bool(results['nan_rows'][row])}",
    )


def _merged(arguments: Arguments, results: Results) -> Faults:
    is_empty = (arguments[1] == -torch.inf) & (arguments[3] == -torch.inf)
    bad = is_empty != (results["lse"] == -torch.inf)
    bad |= results["lse"].isnan()
    yield from fault_where(
        per_row(bad), Rule.SILENT, lambda row: "lse is -inf exactly where both parts are empty"
    )


RULES: Mapping[str, CallRules] = MappingProxyType(
    {
        "rms_norm": CallRules(
            contract.like_first, contract.padding, (0,), recheck_rms_norm, turn=3
        ),
        "layer_norm": CallRules(
            contract.like_first, contract.padding, (0,), recheck_layer_norm, turn=3
        ),
        "rope": CallRules(contract.like_first, contract.padding, (0,), recheck_rope, turn=2),
        "latent_write": CallRules(
            contract.nothing,
            contract.without_slot,
            (0,),
            recheck_latent_write,
            _write_slots,
            writes=(4, 5),
            turn=2,
        ),
        "index_prepare": CallRules(
            contract.prepared,
            contract.padding,
            (0,),
            recheck_index_prepare,
            _write_slots,
            keywise=(1,),
            writes=(4, 5),
            turn=0,
        ),
        "index_scores": CallRules(
            contract.scores,
            contract.without(3),
            (0, 1),
            recheck_index_scores,
            _score_counts,
            _scored,
            turn=3,
        ),
        "index_scores_paged": CallRules(
            contract.paged_scores,
            contract.without(4),
            (0, 1),
            recheck_index_scores_paged,
            _page_counts,
            _scored,
            turn=3,
        ),
        "topk": CallRules(
            contract.chosen, contract.without(1), (), judge_topk, _topk_counts, _chosen
        ),
        "sparse_mla": CallRules(
            contract.attended, contract.without(4), (0, 1), recheck_sparse_mla, _attention_lists
        ),
        "dense_mha": CallRules(
            contract.attended_densely, contract.without(3), (0,), recheck_dense_mha, _visible
        ),
        "lse_merge": CallRules(
            contract.merged, contract.none_silent, (), recheck_lse_merge, after=_merged
        ),
        "context_gather": CallRules(
            contract.gathered,
            contract.none_silent,
            (),
            recheck_context_gather,
            _gather_range,
            turn=3,
        ),
        "moe": CallRules(
            contract.mixed, contract.without_expert, (0, 2), recheck_moe, _experts, turn=1
        ),
        "quantise_rows": CallRules(
            contract.quantised, contract.padding, (0,), recheck_quantise_rows, turn=2
        ),
        "silu_quantise": CallRules(
            contract.quantised_half, contract.padding, (0,), recheck_silu_quantise, turn=2
        ),
        "linear_fp8": CallRules(
            contract.product_fp8, contract.padding, (1,), recheck_linear_fp8, turn=0
        ),
        "moe_fp8": CallRules(
            contract.mixed_fp8,
            contract.without_expert,
            (2,),
            recheck_moe_fp8,
            _experts_fp8,
            turn=1,
        ),
    }
)


def pool_of(arguments: Arguments, rules: CallRules) -> tuple[PagedPool, Tensor] | None:
    """(pool, slots) of an operator that writes a cache."""
    if rules.writes is None:
        return None
    return arguments[rules.writes[0]], arguments[rules.writes[1]]
