"""What a check finds: a Fault of one call, and the Violation that a person reads.

In:  masks over the rows of a call. Out: frozen values that name the rule that was broken.
Not here: the rules themselves (rules.py and its parts), whom a violation concerns (inspector.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

Detail = Callable[[int], str]


class Rule(StrEnum):
    """Every rule of checked mode, in the words that its violations use."""

    SHAPE = "results have the contract's shape and dtype"
    READ_ONLY = "arguments are not written"
    REDZONE = "nothing is written outside the rows of out="
    WRITTEN = "every live row is written"
    FINITE_ARGUMENTS = "arguments of a live row are finite"
    FINITE = "results of a live row are finite"
    LEAK = "NaN of padding rows reaches no live row"
    SILENT = "a row that takes part in nothing gives 0, and -inf as lse or score"
    RANGE = "ids are in range"
    ORDER = "ids ascend and none repeats"
    COUNT = "count is the smaller of k and the keys that the row sees"
    TAIL = "ids behind count are -1"
    BEST = "the chosen keys are the best, ties to the lower position"
    FLAG = "a NaN score raises its row's flag"
    LSE = "lse is the natural log of the row's sum of exponentials"
    VALUE = "a recomputed row agrees with the reference"
    SLOT_RANGE = "slots lie in the pool and outside its null page"
    SLOT_ONCE = "no slot is named twice"
    SLOT_WRITTEN = "the slot of every row is written"
    STRAY = "no other slot is written"


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule that one call broke.

    ``rows``: the rows of the call that break it, ascending; none if no row can be named.
    ``detail(row)``: what was found there and what is allowed. ``is_contained``: the harm stays
    within the requests of these rows; False for foreign memory and for results of a wrong shape.
    ``is_of_writes``: the rows count on the axis of the tokens that the call writes.
    """

    rule: Rule
    rows: tuple[int, ...]
    detail: Detail
    is_contained: bool = True
    is_of_writes: bool = False


Faults = Iterator[Fault]


@dataclass(frozen=True, slots=True)
class Violation:
    """A fault with the names that a person needs: operator, provider, layer, row, request, rule.

    ``row`` counts on the step's axis that the call ran on; ``request`` is the request's name, or
    its number where no name is known.
    """

    op: str
    provider: str
    layer: int | None
    row: int | None
    request: str | None
    position: int | None
    rule: Rule
    detail: str

    def __str__(self) -> str:
        place = "" if self.layer is None else f" in layer {self.layer}"
        if self.row is not None:
            place += f", row {self.row}"
        if self.request is not None:
            at = "" if self.position is None else f", position {self.position}"
            place += f" (request {self.request!r}{at})"
        return f"{self.op} of provider {self.provider!r}{place} breaks '{self.rule}': {self.detail}"


def always(text: str) -> Detail:
    """A detail that is the same for every row."""
    return lambda _: text


def bad_rows(mask: Tensor) -> tuple[int, ...]:
    """The rows where a bool mask [R] is set; one look at the device if there are none."""
    if not bool(mask.any()):
        return ()
    return tuple(mask.nonzero()[:, 0].tolist())


def fault_where(mask: Tensor, rule: Rule, detail: Detail) -> Faults:
    """A fault of the rows where ``mask`` [R] is set, or nothing."""
    rows = bad_rows(mask)
    if rows:
        yield Fault(rule, rows, detail)


def per_row(mask: Tensor) -> Tensor:
    """Whether anything of a row is set: bool [R] of a mask [R, ...]."""
    return mask if mask.dim() == 1 else mask.flatten(1).any(1)
