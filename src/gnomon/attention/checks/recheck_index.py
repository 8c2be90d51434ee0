"""Recomputation of sampled rows of the indexer: scores (both kinds) and the choice of top-k.

In:  a call's arguments and results, the rows to look at. Out: faults. Maths: oracle_math.md §1.5.
The choice is not recomputed but judged: no key left out may be better than one taken, nor equal
and at a lower place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnomon.attention.checks.compare import sum_error, value_fault
from gnomon.attention.checks.effort import Effort, spread
from gnomon.attention.checks.faults import Fault, Faults, Rule, bad_rows
from gnomon.attention.providers import reference
from gnomon.attention.spec.model import Arguments


def recheck_index_scores(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Score the rows again against some of the keys."""
    q, weights, keys, count, scale = arguments
    for row in rows:
        columns = spread(int(count[row]), effort.columns)
        found = results["scores"][row, columns]
        yield from _scored(row, (q[row], weights[row], keys[columns], scale), found)


def recheck_index_scores_paged(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Score the rows again against some of the entries in their own pages."""
    q, weights, pool, pages, count, scale = arguments
    for row in rows:
        columns = torch.tensor(spread(int(count[row]), effort.columns), device=q.device)
        page = pages[row].long()[columns // pool.page_size]
        keys = pool.layout.gather(pool, page * pool.page_size + columns % pool.page_size)
        found = results["scores"][row, columns]
        yield from _scored(row, (q[row], weights[row], keys, scale), found)


def _scored(row: int, inputs: tuple[Tensor, Tensor, Tensor, float], found: Tensor) -> Faults:
    """One row: query [Hi, Di], weights [Hi], keys [n, Di], scale; ``found`` scores [n]."""
    query, weights, keys, scale = inputs
    query, weights, keys = query.double(), weights.double(), keys.double()
    every = torch.tensor([keys.shape[0]], device=query.device)
    expected = reference.index_scores(query[None], weights[None], keys, every, scale)
    size = (weights.abs() * query.norm(dim=-1)).sum() * keys.norm(dim=-1) * scale
    allowed = sum_error(inputs[0].dtype) * size + torch.finfo(found.dtype).tiny
    yield from value_fault("scores", [row], found[None], expected, allowed[None])


def judge_topk(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Whether the rows' ids are the best columns, and whether the margin is what was cut."""
    scores, count, _, want_margin = arguments
    if scores.shape[1] == 0:
        return
    at = torch.tensor(rows, device=scores.device)
    ids, chosen_count = results["ids"].index_select(0, at).long(), results["count"][at]
    values = scores.index_select(0, at)
    values = values.masked_fill(values.isnan(), -torch.inf)
    columns = torch.arange(values.shape[1], device=values.device)
    is_valid = torch.arange(ids.shape[1], device=ids.device) < chosen_count[:, None]
    times = torch.zeros(values.shape, dtype=torch.int32, device=values.device)
    times.scatter_add_(1, ids.clamp(0, values.shape[1] - 1), is_valid.to(torch.int32))
    is_taken = times > 0
    is_left = (columns < count[at][:, None]) & ~is_taken
    worst = values.masked_fill(~is_taken, torch.inf).amin(1, keepdim=True)
    best = values.masked_fill(~is_left, -torch.inf).amax(1, keepdim=True)
    has_left, is_tie = is_left.any(1), (worst == best)[:, 0]
    places = columns.expand_as(values)
    last = places.masked_fill(~(is_taken & (values == worst)), -1).amax(1)
    first_left = places.masked_fill(~(is_left & (values == best)), values.shape[1]).amin(1)
    bad = has_left & ((best > worst)[:, 0] | (is_tie & (last > first_left)))

    def detail(row: int) -> str:
        index = rows.index(row)
        return (
            f"column {int(first_left[index])} with score {float(best[index]):.7g} was left out, "
            f"one with {float(worst[index]):.7g} was taken"
        )

    if found := bad_rows(bad):
        yield Fault(Rule.BEST, tuple(rows[index] for index in found), detail)
    if want_margin:
        gap = torch.where(is_tie, 0.0, (worst - best)[:, 0])
        gap = torch.where(has_left, gap, torch.inf).double()
        allowed = 4 * torch.finfo(scores.dtype).eps * gap.abs().nan_to_num(posinf=0.0)
        yield from value_fault("margin", rows, results["margin"][at], gap, allowed)
