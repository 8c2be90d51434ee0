"""Recomputation of sampled rows of the attention operators: sparse_mla, dense_mha, lse_merge.

In:  a call's arguments and results, the rows to look at. Out: faults. Maths: oracle_math.md §1.2,
by the reference provider in float64; bounds as in compare.py, from ‖query‖ · ‖key‖ · scale, which
bounds every logit, and from the largest value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnomon.attention.checks.compare import lse_fault, rounding, sum_error, value_fault
from gnomon.attention.checks.effort import Effort, spread
from gnomon.attention.checks.faults import Faults
from gnomon.attention.providers import reference
from gnomon.attention.spec.model import Arguments


def recheck_sparse_mla(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Attend the rows' lists again, a few heads of each."""
    q, q_rope, pool, slots, count, scale = arguments
    heads = spread(q.shape[1], effort.heads)
    part, part_rope = (t[rows][:, heads].double() for t in (q, q_rope))
    lists, counts = slots[rows], count[rows]
    out, lse = reference.sparse_mla(part, part_rope, pool, lists, counts, scale)
    longest, largest = [], []
    for row, length in zip(lists, counts.tolist(), strict=True):
        entries = pool.layout.gather(pool, row[:length]).double()
        longest.append(entries.norm(dim=-1).amax() if length else out.new_zeros(()))
        largest.append(entries[:, : q.shape[2]].abs().amax() if length else out.new_zeros(()))
    reach = (part.norm(dim=-1) + part_rope.norm(dim=-1)) * torch.stack(longest)[:, None] * scale
    found = {name: results[name][rows][:, heads] for name in ("out", "lse")}
    yield from _attended(rows, found, (out, lse), reach, torch.stack(largest)[:, None])


def recheck_dense_mha(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Attend the rows' visible keys again, a few heads of each."""
    q, k, v, visible, scale = arguments
    heads = spread(q.shape[1], effort.heads)
    most = int(visible[rows].max())
    keys, values = k[:most, heads], v[:most, heads]
    part = q[rows][:, heads].double()
    out, lse = reference.dense_mha(part, keys, values.double(), visible[rows], scale)
    reach = part.norm(dim=-1) * keys.double().norm(dim=-1).amax(0) * scale
    found = {name: results[name][rows][:, heads] for name in ("out", "lse")}
    yield from _attended(rows, found, (out, lse), reach, values.double().abs().amax((0, 2)))


def recheck_lse_merge(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Join the rows again."""
    out_a, lse_a, out_b, lse_b = (t[rows].double() for t in arguments)
    out, lse = reference.lse_merge(out_a, lse_a, out_b, lse_b)
    reach = torch.zeros_like(lse)
    found = {name: results[name][rows] for name in ("out", "lse")}
    largest = torch.maximum(out_a.abs().amax(-1), out_b.abs().amax(-1))
    yield from _attended(rows, found, (out, lse), reach, largest)


def _attended(
    rows: list[int],
    found: Mapping[str, Tensor],
    expected: tuple[Tensor, Tensor],
    reach: Tensor,
    largest: Tensor,
) -> Faults:
    """``reach`` [m, H] bounds the logits' size, ``largest`` (broadcast to [m, H]) the values'."""
    out, lse = expected
    logit = sum_error(found["out"].dtype) * (1.0 + reach)
    lse_allowed = logit + 4 * rounding(found["lse"].dtype) * (1.0 + lse.abs().nan_to_num(posinf=0))
    yield from lse_fault(rows, found["lse"], lse, lse_allowed)
    allowed = (2.0 * logit + rounding(found["out"].dtype)) * largest
    yield from value_fault("out", rows, found["out"], out, allowed[..., None])
