"""Choose one token per row: the best one, or the winner of a race with counter-based noise.

In:  float32 logits [M, V], already penalised; `Wishes` of the rows, None if all are greedy.
Out: Chosen: int64 token ids (any valid id for a row without a finite maximum) and, float64, the
     maximum of each row of logits, NaN if the row holds NaN.
Maths: a row of temperature 0 takes its greatest logit. Another takes the greatest
logit + temperature · gumbel(seed, position, choice, token) among the tokens that its filters keep
(sampling_filters.py), which is a draw from the softmax of logits / temperature over those tokens
(the Gumbel-max trick; the same as a race of exponential clocks). Ties go to the lower id. Every
token's number is its own: no order, no sum, so neither mates nor the device can move a draw, and
filters and temperatures leave the noise as it is. Sums are float64.
On a GPU two launches do it for all rows (sampling_triton.py); filtered rows look for their edge
before (sampling_edges_triton.py). Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.attention.upload import upload
from gnomon.engine.sampling_filters import Filters, last_kept
from gnomon.engine.sampling_noise import gumbels


@dataclass(frozen=True, slots=True, eq=False)
class Wishes:
    """What each of M rows wishes, on the host. Of greedy rows all but the temperature is unread."""

    temperature: NDArray[np.float64]  # 0: greedy
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]
    choice: NDArray[np.int64]
    top_k: NDArray[np.int64]  # 0 or less: off
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Module docstring."""

    token_ids: Tensor  # [M] int64
    greatest: Tensor  # [M] float64


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Where each row's kept tokens end: logits above, and equal ones up to a token id, are kept."""

    logit: Tensor  # [M] float32, −inf where nothing is filtered
    token_id: Tensor  # [M] int64, V where nothing is filtered


def choose(logits: Tensor, wishes: Wishes | None) -> Chosen:
    """One token per row (module docstring)."""
    if logits.is_cuda:
        return choose_by_kernels(logits, wishes)
    cut = None if wishes is None else cut_of(logits, wishes, last_kept)
    chosen = logits.argmax(dim=-1)
    if wishes is not None:
        rows = np.flatnonzero(wishes.temperature > 0)
        (index,) = upload([rows], logits.device)
        chosen[index] = _winners(logits[index], wishes, rows, cut)
    return Chosen(chosen, logits.amax(dim=-1).double())  # NaN in a row makes its maximum NaN


def choose_by_kernels(logits: Tensor, wishes: Wishes | None) -> Chosen:
    """The same by Triton's kernels."""
    from gnomon.engine import sampling_edges_triton as edges  # nothing for other machines
    from gnomon.engine import sampling_triton

    cut = None if wishes is None else cut_of(logits, wishes, edges.last_kept)
    return sampling_triton.race(logits, wishes, cut)


def _winners(logits: Tensor, wishes: Wishes, rows: NDArray[np.int64], cut: Cut | None) -> Tensor:
    """Token ids [m] of `rows`, whose logits are given."""
    num_tokens, device = logits.shape[-1], logits.device
    noise = gumbels(wishes.seed[rows], wishes.position[rows], wishes.choice[rows], num_tokens)
    noise *= wishes.temperature[rows, None]
    index, added = upload([rows, noise], device)
    score = added.add_(logits)
    if cut is not None:
        edge = cut.logit[index, None]
        ids = torch.arange(num_tokens, device=device)
        is_kept = (logits > edge) | ((logits == edge) & (ids <= cut.token_id[index, None]))
        score.masked_fill_(~is_kept, -math.inf)
    return score.argmax(dim=-1)


def cut_of(
    logits: Tensor, wishes: Wishes, find_last: Callable[[Tensor, Filters], Tensor]
) -> Cut | None:
    """The cut of every row, None if no row is filtered."""
    num_rows, num_tokens = logits.shape
    has_top_k = (wishes.top_k > 0) & (wishes.top_k < num_tokens)
    has_filter = has_top_k | (wishes.top_p < 1.0) | (wishes.min_p > 0.0)
    rows = np.flatnonzero(has_filter & (wishes.temperature > 0))
    if not len(rows):
        return None
    top_k = np.where(has_top_k, wishes.top_k, num_tokens)[rows]
    floats = (wishes.temperature[rows], wishes.top_p[rows], wishes.min_p[rows])
    index, top_k_there, temperature, top_p, min_p = upload([rows, top_k, *floats], logits.device)
    picked = logits[index]
    last = find_last(picked, Filters(temperature, top_k_there, top_p, min_p))
    edge = logits.new_full((num_rows,), -math.inf)
    token_id = torch.full((num_rows,), num_tokens, dtype=torch.int64, device=logits.device)
    edge[index] = picked.gather(-1, last[:, None]).squeeze(-1)
    token_id[index] = last
    return Cut(edge, token_id)
