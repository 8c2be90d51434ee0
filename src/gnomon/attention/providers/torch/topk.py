"""Exact top-k of the torch provider: a partition finds the edge, a stable sort settles the rest.

In:  scores [M, N], −inf behind the first count[m] columns; k. Out: TopK.
On the CPU numpy's partition, which is vectorised, gives the k-th largest score of a row; the
columns at or above it are the answer, in ascending order already. Elsewhere it is torch's top-k.
A row is loose where that is not the whole truth: equal scores on both sides of the edge, NaN, or
fewer than k columns to see. Loose rows, few as a rule, are sorted in full.
The rule for ties and NaN: design.md §5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.attention.ops.values import TopK

BLOCK_ROWS = 64  # rows that share a width; a prefill's later rows see more keys
Best = tuple[Tensor, Tensor | None, Tensor | None]  # ids [M, k], loose rows if any, margin


def topk(scores: Tensor, count: Tensor, k: int, want_margin: bool = False) -> TopK:
    """The exact k best of the first count[m] columns; the columns behind hold −inf."""
    if scores.shape[1] <= k:
        return _all_columns(scores, count, k, want_margin)
    find = _best_on_host if scores.device.type == "cpu" else _best_on_device
    ids, is_loose, margin = find(scores, count, k, want_margin)
    nan_rows = torch.zeros(scores.shape[0], dtype=torch.bool, device=scores.device)
    if is_loose is not None:
        rows = is_loose.nonzero()[:, 0]
        loose = scores.index_select(0, rows)
        fixed, fixed_margin = _sorted_best(loose, count.index_select(0, rows), k)
        ids.index_copy_(0, rows, fixed)
        nan_rows.index_copy_(0, rows, loose.isnan().any(1))
        if margin is not None:
            margin.index_copy_(0, rows, fixed_margin)
    return TopK(ids, count.clamp_max(k), margin, nan_rows)


def _all_columns(scores: Tensor, count: Tensor, k: int, want_margin: bool) -> TopK:
    columns = torch.arange(k, dtype=torch.int32, device=scores.device)
    ids = columns.masked_fill(columns >= count[:, None], -1)
    margin = torch.full_like(scores[:, 0], torch.inf) if want_margin else None
    return TopK(ids, count.to(torch.int32), margin, scores.isnan().any(1))


def _best_on_host(scores: Tensor, count: Tensor, k: int, want_margin: bool) -> Best:
    values = scores.numpy()
    num_rows, num_columns = values.shape
    if num_rows < 2 * BLOCK_ROWS:
        blocks = [_partitioned(values, k, want_margin)]
    else:
        counts = count.tolist()
        blocks = []
        for start in range(0, num_rows, BLOCK_ROWS):
            seen = max(k + 1, *counts[start : start + BLOCK_ROWS])
            part = values[start : start + BLOCK_ROWS, : min(seen, num_columns)]
            blocks.append(_partitioned(part, k, want_margin))
    ids, loose, margins = zip(*blocks, strict=True)
    is_loose = _joined(loose) if any(part.any() for part in loose) else None
    return _joined(ids), is_loose, _joined(margins) if want_margin else None


def _joined(parts: tuple[NDArray[Any], ...]) -> Tensor:
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def _partitioned(
    values: NDArray[Any], k: int, want_margin: bool
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[Any] | None]:
    """(ids [m, k], loose [m], margin [m] if wanted) of values [m, n], n > k."""
    num_rows, num_columns = values.shape
    edge = num_columns - k
    parted = np.partition(values, edge, axis=1)  # NaN counts as the largest
    best = parted[:, edge:]
    is_chosen = values >= best[:, :1]
    flat = np.flatnonzero(is_chosen)
    loose = np.zeros(num_rows, dtype=np.bool_)
    if flat.size != num_rows * k or np.isnan(best).any():
        loose = (is_chosen.sum(1) != k) | np.isnan(best).any(1)
        is_chosen[loose] = np.arange(num_columns) < k  # any k columns; they are replaced
        flat = np.flatnonzero(is_chosen)
    first = np.arange(0, num_rows * num_columns, num_columns)
    ids = (flat.reshape(num_rows, k) - first[:, None]).astype(np.int32)
    if not want_margin:
        return ids, loose, None
    with np.errstate(invalid="ignore"):  # −inf less −inf, of loose rows
        return ids, loose, best[:, 0] - parted[:, :edge].max(1)


def _best_on_device(scores: Tensor, count: Tensor, k: int, want_margin: bool) -> Best:
    values, order = scores.topk(k + 1, dim=1)  # NaN comes first
    last, first_cut = values[:, k - 1], values[:, k]
    is_loose = ~((values[:, 0] >= last) & (last > first_cut))
    ids = order[:, :k].to(torch.int32).sort(dim=1).values
    margin = last - first_cut if want_margin else None
    return ids, is_loose if bool(is_loose.any()) else None, margin


def _sorted_best(scores: Tensor, count: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ascending ids [m, k] and margin [m] by a stable sort: equal scores keep column order."""
    clean = scores.masked_fill(scores.isnan(), -torch.inf)
    values, order = clean.sort(dim=1, descending=True, stable=True)
    last, first_cut = values[:, k - 1], values[:, k]
    margin = torch.where(last == first_cut, torch.zeros_like(last), last - first_cut)
    behind = torch.iinfo(torch.int32).max
    ids = order[:, :k].to(torch.int32)
    ids = ids.masked_fill(ids >= count[:, None], behind).sort(dim=1).values
    return ids.masked_fill(ids == behind, -1), margin.masked_fill(count <= k, torch.inf)
