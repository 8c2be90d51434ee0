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

from gnomon.attention.checks import arguments as before
from gnomon.attention.checks import contract
from gnomon.attention.checks.effort import Effort
from gnomon.attention.checks.faults import Faults, Rule, fault_where, per_row
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


def _scored(arguments: Arguments, results: Results) -> Faults:
    scores, count = results["scores"], arguments[-2]
    yield from before.hidden_columns(scores, count)
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
            before.write_slots,
            writes=(4, 5),
            turn=2,
        ),
        "index_prepare": CallRules(
            contract.prepared,
            contract.padding,
            (0,),
            recheck_index_prepare,
            before.write_slots,
            keywise=(1,),
            writes=(4, 5),
            turn=0,
        ),
        "index_scores": CallRules(
            contract.scores,
            contract.without(3),
            (0, 1),
            recheck_index_scores,
            before.score_counts,
            _scored,
            turn=3,
        ),
        "index_scores_paged": CallRules(
            contract.paged_scores,
            contract.without(4),
            (0, 1),
            recheck_index_scores_paged,
            before.page_counts,
            _scored,
            turn=3,
        ),
        "topk": CallRules(
            contract.chosen, contract.without(1), (), judge_topk, before.topk_counts, _chosen
        ),
        "sparse_mla": CallRules(
            contract.attended,
            contract.without(4),
            (0, 1),
            recheck_sparse_mla,
            before.attention_lists,
        ),
        "dense_mha": CallRules(
            contract.attended_densely, contract.without(3), (0,), recheck_dense_mha, before.visible
        ),
        "lse_merge": CallRules(
            contract.merged, contract.none_silent, (), recheck_lse_merge, after=_merged
        ),
        "context_gather": CallRules(
            contract.gathered,
            contract.none_silent,
            (),
            recheck_context_gather,
            before.gather_range,
            turn=3,
        ),
        "moe": CallRules(
            contract.mixed, contract.without_expert, (0, 2), recheck_moe, before.experts, turn=1
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
            before.experts_fp8,
            turn=1,
        ),
    }
)


def pool_of(arguments: Arguments, rules: CallRules) -> tuple[PagedPool, Tensor] | None:
    """(pool, slots) of an operator that writes a cache."""
    if rules.writes is None:
        return None
    return arguments[rules.writes[0]], arguments[rules.writes[1]]
