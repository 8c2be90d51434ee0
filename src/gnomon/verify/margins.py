"""The margin rule: which differences between two runs are faults, and which are ties.

In:  two traces of one prompt, and tolerances.
Out: a Comparison: the worst logit difference and every divergence: keys, experts, token, logits.
Rule (design.md §9, made sharper where both sides' choices are known). The discrete choices of a
model (keys, experts, tokens) jump where two candidates come close, so equal maths may choose
otherwise. A choice that differs is a *root* if no other choice that could have caused it differs:
none at an earlier position in an earlier layer, none earlier in its own row. The margin of each
root, the gap between the last candidate taken and the first one left, must be below the tie
tolerance: then it is a tie. What follows from a tie is not compared; the caller repeats the run
with the choices replayed, and then everything has to agree. Any other difference is a fault, and
then no row is excused. Messages give the smallest gap so far too, over all earlier rows and layers.
Not here: how runs are made (trace.py, oracle.py), counting ties (result.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from gnomon.verify.cached_values import code_fault
from gnomon.verify.trace import Trace

TIE = 1e-5  # float32: scores of unit scale are known to about 1e-6 (oracle_math.md §3.2)


@dataclass(frozen=True, slots=True)
class Tolerances:
    """`logits`: largest |difference| at logits of standard deviation 1; it grows with theirs.

    `tie`: a choice whose margin is at most this may go either way.
    """

    logits: float
    tie: float = TIE


AGAINST_TRANSFORMERS = Tolerances(5e-5)  # oracle_math.md §4.3
# oracle_math.md §4.3 says 1e-5, from 130 rows. Over 300,000 rows the worst seen is 1.2e-5, as much
# as against transformers: two ways to sum the same float32 numbers.
AMONG_OURS = Tolerances(3e-5)


class Kind(StrEnum):
    """What differs."""

    KEYS = "keys"
    EXPERTS = "experts"
    LATENTS = "latents"
    INDEX_KEYS = "index keys"
    INDEX_QUERIES = "index queries"
    TOKEN = "token"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Divergence:
    """One difference. `layer` None: of the head. `size`: of a logit difference, else 0.

    `detail`: of a difference of cached values.
    """

    kind: Kind
    position: int
    layer: int | None
    margin: float
    smallest_gap: float
    is_tie: bool
    size: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        where = f"position {self.position}"
        if self.layer is not None:
            where += f", layer {self.layer}"
        if self.detail:
            return f"{self.kind} differ at {where}: {self.detail}"
        size = f" by {self.size:.3g}" if self.kind is Kind.LOGITS else ""
        return (
            f"{self.kind} differ{size} at {where}: margin {self.margin:.3g}, smallest gap so far "
            f"{self.smallest_gap:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """`worst`: largest logit difference over the rows that were compared.

    `num_choices`: rows times layers whose keys or experts were compared.
    """

    worst: float
    num_choices: int
    divergences: tuple[Divergence, ...]

    @property
    def faults(self) -> tuple[Divergence, ...]:
        """Divergences that no margin excuses."""
        return tuple(one for one in self.divergences if not one.is_tie)

    @property
    def is_tie(self) -> bool:
        """Something differs, and all that does is excused."""
        return bool(self.divergences) and not self.faults

    @property
    def is_token_tie(self) -> bool:
        """The tokens differ, and a margin excuses it."""
        return self.is_tie and any(one.kind is Kind.TOKEN for one in self.divergences)

    @property
    def num_choice_ties(self) -> int:
        """Choices of keys and experts that were tied."""
        kinds = (Kind.KEYS, Kind.EXPERTS)
        return sum(one.is_tie and one.kind in kinds for one in self.divergences)


def compare(expected: Trace, found: Trace, tolerances: Tolerances) -> Comparison:
    """Compare two runs of one prompt, row by row, up to the first token that differs."""
    num_common = _num_common(expected.tokens, found.tokens)
    num_rows = min(num_common, len(expected.logits), len(found.logits))
    mask = expected.is_computed[:num_rows] & found.is_computed[:num_rows]
    sides = (expected, found)
    roots = list(_roots(sides, mask, tolerances))
    end = num_rows
    if roots and all(root.is_tie for root in roots):
        end = min(root.position for root in roots)
    worst, row, allowed = _worst_logits(sides, mask, end, tolerances)
    divergences = list(roots)
    if not worst <= allowed:
        gap = smallest_gap(sides, row)
        divergences.append(Divergence(Kind.LOGITS, row, None, math.inf, gap, False, worst))
    divergences += _cache_divergences(sides, mask[:end], tolerances)
    divergences += _token_divergence(sides, num_common, end, tolerances)
    shared = (
        expected.keys.keys() & found.keys.keys(),
        expected.experts.keys() & found.experts.keys(),
    )
    num_choices = int(mask.sum()) * sum(len(layers) for layers in shared)
    return Comparison(worst, num_choices, tuple(divergences))


def _num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))


def _worst_logits(
    sides: tuple[Trace, Trace], mask: Tensor, end: int, tolerances: Tolerances
) -> tuple[float, int, float]:
    """(largest difference, the first row that is over the tolerance or the worst, tolerance)."""
    rows = mask[:end].nonzero()[:, 0]
    if not len(rows):
        return 0.0, 0, tolerances.logits
    expected, found = (side.logits[rows] for side in sides)
    allowed = tolerances.logits * max(1.0, float(expected.std()))
    difference = (expected - found).abs().amax(-1)
    difference = difference.nan_to_num(nan=torch.inf)
    over = (difference > allowed).nonzero()[:, 0]
    place = int(over[0]) if len(over) else int(difference.argmax())
    return float(difference.max()), int(rows[place]), allowed


def _cache_divergences(
    sides: tuple[Trace, Trace], mask: Tensor, tolerances: Tolerances
) -> Iterator[Divergence]:
    """Codes of a rounding cache that differ by more than a tolerance explains (cached_values)."""
    expected, found = sides
    for kind, layer in sorted(expected.cached.keys() & found.cached.keys()):
        part = (kind, layer)
        fault = code_fault(expected.cached[part], found.cached[part], mask, tolerances.logits)
        if fault is not None:
            row, what = fault
            yield Divergence(Kind(kind), row, layer, math.inf, math.inf, False, detail=what)


def _token_divergence(
    sides: tuple[Trace, Trace], num_common: int, end: int, tolerances: Tolerances
) -> Iterator[Divergence]:
    """The first token that differs, if both runs have one there."""
    expected, found = sides
    if num_common >= min(len(expected.tokens), len(found.tokens)):
        return
    row = num_common - 1
    gap = smallest_gap(sides, row)
    if row >= end:  # it follows from a tie
        yield Divergence(Kind.TOKEN, row, None, gap, gap, True)
        return
    margin = token_margin(expected, row)
    yield Divergence(Kind.TOKEN, row, None, margin, gap, margin <= tolerances.tie)


def token_margin(trace: Trace, row: int) -> float:
    """Gap between the two best logits of a row; +inf where the token was not the best one.

    A drawn token is no greedy choice, so that no gap of logits excuses another one.
    """
    best = trace.logits[row].topk(2)
    is_greedy = row + 1 < len(trace.tokens) and trace.tokens[row + 1] == int(best.indices[0])
    return float(best.values[0] - best.values[1]) if is_greedy else math.inf


def smallest_gap(sides: tuple[Trace, Trace], row: int) -> float:
    """Smallest gap over rows 0 .. row and all layers: at the key lists, the experts, the tokens."""
    gaps = [math.inf]
    for side in sides:
        for margins in (side.key_margin, side.expert_margin):
            gaps += [float(margin[: row + 1].min()) for margin in margins.values()]
        for place in range(side.num_prompt - 1, min(row + 1, len(side.logits))):
            if side.is_computed[place]:
                gaps.append(token_margin(side, place))
    return min(gaps)


def _roots(
    sides: tuple[Trace, Trace], mask: Tensor, tolerances: Tolerances
) -> Iterator[Divergence]:
    """Choices that differ without one before them that could be the cause (module docstring)."""
    first_in_row: dict[int, tuple[int, int]] = {}  # position -> (layer, 0 keys or 1 experts)
    for stage, (layer, differs) in _differences(sides, mask):
        for position in differs.nonzero()[:, 0].tolist():
            here = (layer, stage)
            first_in_row[position] = min(first_in_row.get(position, here), here)
    lowest_layer = math.inf
    for position in sorted(first_in_row):
        layer, stage = first_in_row[position]
        if layer <= lowest_layer:
            margin = _margin(sides, stage, layer, position)
            yield Divergence(
                kind=Kind.EXPERTS if stage else Kind.KEYS,
                position=position,
                layer=layer,
                margin=margin,
                smallest_gap=smallest_gap(sides, position),
                is_tie=margin <= tolerances.tie,
            )
        lowest_layer = min(lowest_layer, layer)


def _differences(
    sides: tuple[Trace, Trace], mask: Tensor
) -> Iterator[tuple[int, tuple[int, Tensor]]]:
    """(0 for keys or 1 for experts, (layer, bool [n]: the choice of the row differs))."""
    expected, found = sides
    pairs = ((expected.keys, found.keys), (expected.experts, found.experts))
    for stage, (first, second) in enumerate(pairs):
        for layer in sorted(first.keys() & second.keys()):
            yield stage, (layer, _rows_differ(first[layer], second[layer], mask))


def _rows_differ(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    num_rows, width = len(mask), max(first.shape[1], second.shape[1])
    a, b = (
        torch.nn.functional.pad(ids[:num_rows].long(), (0, width - ids.shape[1]), value=-1)
        for ids in (first, second)
    )
    return (a != b).any(-1) & mask


def _margin(sides: tuple[Trace, Trace], stage: int, layer: int, position: int) -> float:
    """The smaller of both sides' margins; transformers tells none."""
    found = [math.inf]
    for side in sides:
        margins: Mapping[int, Tensor] = side.expert_margin if stage else side.key_margin
        if layer in margins:
            found.append(float(margins[layer][position]))
    return min(found)
