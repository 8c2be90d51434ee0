"""How much of a call is recomputed, and which rows: enough to notice, little enough to afford.

In:  the rows that may be chosen, a counter. Out: row numbers, spread and different from call to
call, the same for the same counter. Not here: which layers are looked at (checked.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TURNS = 4  # visits in which sparing checks have recomputed rows of every operator
STRIDE = 7919  # a prime, so that successive calls meet different rows


@dataclass(frozen=True, slots=True)
class Effort:
    """Upper bounds of one recomputation. ``numbers``: of expert weights that may be converted."""

    rows: int
    heads: int
    columns: int
    numbers: int


SPARING = Effort(rows=1, heads=4, columns=128, numbers=1 << 21)
THOROUGH = Effort(rows=16, heads=1 << 30, columns=1 << 30, numbers=1 << 62)


def pick_rows(candidates: Tensor | int, limit: int, tick: int) -> list[int]:
    """Up to ``limit`` of the rows set in a bool mask [R] (or of so many rows), evenly spaced."""
    if isinstance(candidates, int):
        chosen: list[int] | range = range(candidates)
    else:
        chosen = candidates.nonzero()[:, 0].tolist()
    if len(chosen) <= limit:
        return list(chosen)
    length = len(chosen)
    places = ((tick * STRIDE + turn * length // limit) % length for turn in range(limit))
    return [chosen[place] for place in sorted(places)]


def spread(length: int, limit: int) -> list[int]:
    """Up to ``limit`` of 0 .. length − 1 (at least 2), evenly spaced, from first to last."""
    if length <= limit:
        return list(range(length))
    return [place * (length - 1) // (limit - 1) for place in range(limit)]
