"""Reference indexer: scores row by row, and selection by sorting.

In:  index queries, head weights, keys. Out: scores (fp32, or fp64 for fp64 queries), exact top-k.
Maths: oracle_math.md §1.5; the rule for ties and NaN: design.md §5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import TopK


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float) -> Tensor:
    """scores[m, n] = scale · Σ_h weights[m, h] · relu(q[m, h] · keys[n]); q [M, Hi, Di].

    Columns from ``count`` [M] on are −inf.
    """
    out = torch.zeros(q.shape[0], keys.shape[0], dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        similarity = (q[:, head].double() @ keys.double().T).clamp(min=0)
        out += weights[:, head, None].double() * similarity
    hidden = torch.arange(keys.shape[0], device=q.device) >= count[:, None]
    scores = (out * scale).masked_fill(hidden, -torch.inf)
    return scores.to(q.dtype if q.dtype == torch.float64 else torch.float32)


def index_scores_paged(
    q: Tensor, weights: Tensor, pool: PagedPool, pages: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same for rows that each have their own pages [M, P]: [M, P * page_size].

    Columns from ``count`` [M] on are −inf.
    """
    size = pool.page_size
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    out = torch.full((q.shape[0], pages.shape[1] * size), -torch.inf, dtype=dtype, device=q.device)
    for row, length in enumerate(count.tolist()):
        positions = torch.arange(length, device=q.device)
        slots = pages[row, positions // size].long() * size + positions % size
        keys = pool.layout.gather(pool, slots)
        out[row, :length] = index_scores(
            q[row, None], weights[row, None], keys, count[row, None], scale
        )[0]
    return out


def topk(scores: Tensor, count: Tensor, k: int, want_margin: bool = False) -> TopK:
    """Sort the first ``count[m]`` columns of each row by (higher score, lower column); keep k."""
    num_rows = scores.shape[0]
    ids = torch.full((num_rows, k), -1, dtype=torch.int32)
    counts, margins, has_nan = [], [], []
    for row, length in enumerate(count.tolist()):
        values = scores[row, :length].tolist()
        clean = [-math.inf if math.isnan(value) else value for value in values]
        order = sorted(range(length), key=lambda column: (-clean[column], column))
        kept = sorted(order[:k])
        ids[row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        counts.append(len(kept))
        has_nan.append(any(math.isnan(value) for value in values))
        margins.append(_margin(clean, order, k))
    margin = torch.tensor(margins, dtype=scores.dtype, device=scores.device)
    return TopK(
        ids.to(scores.device),
        torch.tensor(counts, dtype=torch.int32, device=scores.device),
        margin if want_margin else None,
        torch.tensor(has_nan, dtype=torch.bool, device=scores.device),
    )


def _margin(values: list[float], order: list[int], k: int) -> float:
    if len(order) <= k:
        return math.inf
    last, first_cut = values[order[k - 1]], values[order[k]]
    return 0.0 if last == first_cut else last - first_cut
