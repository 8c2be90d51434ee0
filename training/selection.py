"""The indexer's choice of keys, and the ways to spoil it that the measurements need.

In:  index queries [B * T, Hi, Di], keys [B * T, Di], head weights [B * T, Hi].
Out: `select` -> positions [B, T, K] (no gradient); `scores_of` -> scores [B, R, T] of some rows,
     with gradient, for the indexer's own loss.
Maths: oracle_math §1.5. On a GPU the scores of all rows come from `index_kernel`.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from training.index_kernel import causal_scores
from training.shapes import Shape

SCORE_ELEMENTS = 2**26  # of [rows, Hi, T] that the plain form holds at a time


class Choice(StrEnum):
    """How rows choose. All but EXACT are faults, put in to see whether they show."""

    EXACT = "exact"
    RANDOM = "random"
    FLIPPED = "flipped"  # index rotations in the other convention; the model applies it
    ONE = "one"  # the best key only


def score_scale(shape: Shape) -> float:
    """Factor of index scores."""
    return (shape.index_heads * shape.index_dim) ** -0.5


def scores_of(query: Tensor, weight: Tensor, key: Tensor, shape: Shape) -> Tensor:
    """[B, R, T] float32 of query [B, R, Hi, Di], weight [B, R, Hi], key [B, T, Di]."""
    batch, num_rows, heads, dim = query.shape
    dots = torch.bmm(query.reshape(batch, -1, dim), key.transpose(1, 2)).relu_()
    dots = dots.view(batch * num_rows, heads, -1)
    weight = (weight * score_scale(shape)).reshape(batch * num_rows, 1, heads)
    return torch.bmm(weight.to(dots.dtype), dots).view(batch, num_rows, -1).float()


@torch.no_grad()
def select(rows: tuple[Tensor, Tensor, Tensor], batch: int, shape: Shape, choice: Choice) -> Tensor:
    """The `index_topk` best positions of every row, [B, T, K] int64, in no order."""
    query, key, weight = (part.detach() for part in rows)
    length = len(key) // batch
    width = min(1 if choice is Choice.ONE else shape.topk, length)
    query = query.view(batch, length, shape.index_heads, shape.index_dim)
    key, weight = key.view(batch, length, -1), weight.view(batch, length, -1)
    if choice is Choice.RANDOM:
        scores = torch.rand(batch, length, length, device=key.device)
        return _best(_hide_future(scores, 0), width)
    if key.is_cuda:
        return _best(causal_scores(query, key, weight * score_scale(shape)), width)
    step = max(1, SCORE_ELEMENTS // (batch * shape.index_heads * length))
    return torch.cat(
        [
            _best(
                _hide_future(
                    scores_of(query[:, t : t + step], weight[:, t : t + step], key, shape), t
                ),
                width,
            )
            for t in range(0, length, step)
        ],
        dim=1,
    )


def _hide_future(scores: Tensor, start: int) -> Tensor:
    """Scores [B, R, T] of rows start, start + 1, ...: −inf at later positions."""
    place = torch.arange(scores.shape[2], device=scores.device)
    row = start + torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill_(place[None, :] > row[:, None], -torch.inf)


def _best(scores: Tensor, width: int) -> Tensor:
    return scores.topk(width, dim=-1, sorted=False).indices
