"""Two runs in arithmetic that rounds: one made its choices, the other was given them.

In:  the trace of a free run, that of a run with its tokens, key lists, experts and cached values
     replayed, and the Roughness of their arithmetic.
Out: a Comparison whose divergences are all faults; `worst` is the root mean square difference of
     the worst row, at logits of standard deviation 1.
With 16 bits two ways to sum differ in the third digit; the scores of keys and experts cross each
other everywhere, and a free run soon stands on other tokens. With every choice replayed, all rows
can be compared. What the second run would have chosen itself is known too, each choice from
inputs that differ by rounding alone: no more than a share of a row's keys may be others, no more
than a share of all rows may have other experts, another token only at close logits, and codes of a
cache as cached_values.code_fault says.
Not here: exact arithmetic (margins.py), how much is allowed (roughness.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gnomon.verify.cached_values import code_fault
from gnomon.verify.margins import Comparison, Divergence, Kind
from gnomon.verify.roughness import WIDEST, Roughness
from gnomon.verify.trace import Trace

LEAST_ROWS = 32  # a share of fewer rows says little: then one row of it is allowed


def compare_rough(expected: Trace, found: Trace, limits: Roughness) -> Comparison:
    """Compare row by row (module docstring)."""
    num_rows = min(len(expected.logits), len(found.logits))
    mask = expected.is_computed[:num_rows] & found.is_computed[:num_rows]
    divergences = [
        *_logits(expected, found, mask, limits),
        *_keys(expected, found, mask, limits),
        *_experts(expected, found, mask, limits),
        *_codes(expected, found, mask, limits),
    ]
    rows = mask.nonzero()[:, 0]
    off = row_differences(expected.logits[rows], found.logits[rows])
    worst = float(off.max()) if len(rows) else 0.0
    shared = (
        expected.keys.keys() & found.keys.keys(),
        expected.experts.keys() & found.experts.keys(),
    )
    return Comparison(worst, len(rows) * sum(map(len, shared)), tuple(divergences))


def row_differences(expected: Tensor, found: Tensor) -> Tensor:
    """Root mean square difference [n] of logits [n, V], at a standard deviation of 1."""
    scale = max(1.0, float(expected.double().std()))
    off = (expected.double() - found.double()).nan_to_num(nan=math.inf) / scale
    return off.square().mean(-1).sqrt()


def best_gap(logits: Tensor) -> Tensor:
    """Gap [n] between the two best logits of each row, at a standard deviation of 1."""
    best = logits.double().topk(2).values
    return (best[:, 0] - best[:, 1]) / max(1.0, float(logits.double().std()))


def _logits(expected: Trace, found: Trace, mask: Tensor, limits: Roughness) -> Iterator[Divergence]:
    rows = mask.nonzero()[:, 0]
    ours, theirs = expected.logits[rows], found.logits[rows]
    off, gap = row_differences(ours, theirs), best_gap(ours)
    far = (off > limits.logits).nonzero()[:, 0]
    if len(far):
        row = int(far[0])
        size = float(off[row])
        yield Divergence(Kind.LOGITS, int(rows[row]), None, math.inf, math.inf, False, size)
    is_other = (ours.argmax(-1) != theirs.argmax(-1)) & (gap > WIDEST * limits.logits)
    for row in is_other.nonzero()[:1, 0].tolist():
        margin = float(gap[row])
        yield Divergence(Kind.TOKEN, int(rows[row]), None, margin, math.inf, False)


def _keys(expected: Trace, found: Trace, mask: Tensor, limits: Roughness) -> Iterator[Divergence]:
    for layer in sorted(expected.keys.keys() & found.keys.keys()):
        share = other_share(expected.keys[layer], found.keys[layer], len(mask))
        far = (mask & (share > limits.keys)).nonzero()[:, 0]
        if len(far):
            row = int(far[0])
            what = f"{float(share[row]):.1%} of the keys are others (allowed {limits.keys:.0%})"
            yield Divergence(Kind.KEYS, row, layer, math.inf, math.inf, False, detail=what)


def other_share(expected: Tensor, found: Tensor, num_rows: int) -> Tensor:
    """Of each row's ids [n, W], -1 behind the last: the share that the other list lacks, [n]."""
    ours, theirs = expected[:num_rows].long(), found[:num_rows].long()
    width = 1 + max(int(ours.max()), int(theirs.max()), 0)
    held = torch.zeros(num_rows, width + 1, dtype=torch.bool)
    held.scatter_(1, torch.where(theirs >= 0, theirs, width), True)
    held[:, width] = False
    is_given = ours >= 0
    is_shared = held.gather(1, ours.clamp(min=0)) & is_given
    missing = is_given.sum(-1) - is_shared.sum(-1)
    # A row of many keys may swap one with a neighbour without that being a share.
    return (missing - 1).clamp(min=0) / is_given.sum(-1).clamp(min=1)


def _experts(
    expected: Trace, found: Trace, mask: Tensor, limits: Roughness
) -> Iterator[Divergence]:
    num_rows = int(mask.sum())
    for layer in sorted(expected.experts.keys() & found.experts.keys()):
        ours, theirs = (side.experts[layer][: len(mask)] for side in (expected, found))
        is_other = (ours != theirs).any(-1) & mask
        count = int(is_other.sum())
        if count > max(1.0, limits.experts * max(num_rows, LEAST_ROWS)):
            what = f"{count} of {num_rows} rows have others (allowed {limits.experts:.0%})"
            first = int(is_other.nonzero()[0, 0])
            yield Divergence(Kind.EXPERTS, first, layer, math.inf, math.inf, False, detail=what)


def _codes(expected: Trace, found: Trace, mask: Tensor, limits: Roughness) -> Iterator[Divergence]:
    for part in sorted(expected.cached.keys() & found.cached.keys()):
        kind, layer = part
        fault = code_fault(expected.cached[part], found.cached[part], mask, limits.codes)
        if fault is not None:
            row, what = fault
            yield Divergence(Kind(kind), row, layer, math.inf, math.inf, False, detail=what)
