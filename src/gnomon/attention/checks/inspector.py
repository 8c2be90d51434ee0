"""Inspector: where a checked call stands in its step, and what becomes of its faults.

In:  steps and layers as they begin; the axes that operators name; faults of calls.
Out: counters; violations with layer, row, request and position. If ``isolates``, a contained fault
of a request's row is kept, so that this request alone can fail, and so is one of a padding row,
which harms nobody; any other raises NumericsError at once. A request that has failed in a step is
not reported again in it.
Not here: the rules, the choice of layers (checked.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.checks.effort import SPARING, THOROUGH, Effort
from gnomon.attention.checks.faults import Fault, Violation
from gnomon.attention.plan import PagedScoreChunk, ScoreChunk, StepPlan
from gnomon.errors import NumericsError


@dataclass(frozen=True, slots=True, eq=False)
class CallRows:
    """The rows of one call: row i is row ``rows[i]`` of ``axis`` (None: all of them, in order).

    ``request``: of calls whose rows are the entries of one request; row i is entry first + i.
    """

    axis: RowAxis | None = None
    rows: Sequence[int] | None = None
    request: int | None = None
    first: int = 0

    def locate(self, row: int) -> tuple[int, int | None, int | None]:
        """(row on the axis, request index, position); None where it is not known, or padding."""
        if self.request is not None:
            return row, self.request, self.first + row
        place = self.rows[row] if self.rows is not None and 0 <= row < len(self.rows) else row
        if self.axis is None or not 0 <= place < self.axis.num_rows:
            return place, None, None
        request, position = int(self.axis.request[place]), int(self.axis.position[place])
        return place, (request if request >= 0 else None), position

    def is_padding(self, row: int | None) -> bool:
        """Whether a row of the call is known to be a padding row."""
        if row is None or self.axis is None:
            return False
        _, request, position = self.locate(row)
        return request is None and position is not None

    def live(self, num_rows: int) -> Tensor | None:
        """Which rows of the call are live; None if the axis is not known to be theirs."""
        if self.axis is None or self.rows is not None or self.axis.num_rows != num_rows:
            return None
        return self.axis.is_live()


NOWHERE = CallRows()


class Inspector:
    """The state of checked mode. ``rows`` and ``write_rows`` belong to the call to come."""

    def __init__(self, is_thorough: bool, isolates: bool = False) -> None:
        self.is_thorough = is_thorough
        self.effort: Effort = THOROUGH if is_thorough else SPARING
        self.is_active = False
        self.layer: int | None = None
        self.rows = NOWHERE
        self.write_rows = NOWHERE
        self.num_checks = 0  # calls checked since the start
        self.num_violations = 0
        self._turn = 0  # of the operators that are not recomputed in every visit
        self._isolates = isolates
        self._names: tuple[str, ...] = ()
        self._plan: StepPlan | None = None
        self._layers: frozenset[int] | None = None
        self._kept: dict[str, Violation] = {}  # by request, or by operator for padding rows
        self._axis: RowAxis | None = None  # of the chunks
        self._chunks: deque[ScoreChunk] = deque()
        self._pieces: deque[CallRows] = deque()

    # ------------------------------------------------------------ where a call stands

    def begin_step(
        self,
        plan: StepPlan | None,
        names: Iterable[str],
        layers: frozenset[int] | None,
        turn: int = 0,
    ) -> None:
        """A step begins; ``layers`` are to be checked, None for all. ``turn``: see effort.TURNS."""
        self._turn = turn
        self._plan, self._names, self._layers = plan, tuple(names), layers
        self._kept = {}
        self.layer, self.is_active = None, layers is None
        self._chunks.clear()
        self._pieces.clear()
        self.rows = self.write_rows = NOWHERE

    def begin_layer(self, layer: int) -> None:
        """The calls from here on are of this layer."""
        self.layer = layer
        self.is_active = self._layers is None or layer in self._layers
        self._pieces.clear()
        dense = None if self._plan is None else self._plan.dense
        if dense is not None and self._plan is not None:
            self._pieces.extend(
                CallRows(dense.axis, range(piece.row_start, piece.row_stop))
                for chunk in self._plan.context_chunks
                for piece in chunk.pieces
            )

    def stand_on_step(self, num_rows: int) -> None:
        """The call to come runs on the step's rows, if it has as many."""
        axis = None if self._plan is None else self._plan.axis
        fits = axis is not None and axis.num_rows == num_rows
        self.rows = CallRows(axis) if fits else NOWHERE

    def stand_on_piece(self, num_rows: int) -> None:
        """The call to come attends the next piece of the plan's context."""
        piece = self._pieces.popleft() if self._pieces else NOWHERE
        self.rows = piece if piece.rows is None or len(piece.rows) == num_rows else NOWHERE

    def stand_on_chunks(self, axis: RowAxis, plan: StepPlan) -> None:
        """The calls to come score the plan's chunks, one after the other."""
        self._axis = axis
        self._chunks = deque(plan.score_chunks)

    def recomputes(self, turn: int | None) -> bool:
        """Whether rows of an operator of this turn are recomputed now."""
        return self.is_thorough or turn is None or turn == self._turn

    def begin_call(self, op: str) -> None:
        """The next call of a kernel begins: it may be of the next chunk. Count it."""
        self.num_checks += 1
        if not self._chunks:
            return
        chunk = self._chunks[0]
        if isinstance(chunk, PagedScoreChunk):
            rows = CallRows(self._axis, chunk.rows)
        elif op == "context_gather":
            self.rows = CallRows(request=chunk.request, first=chunk.key_start)
            return
        else:
            rows = CallRows(self._axis, range(chunk.row_start, chunk.row_stop))
        if op in ("index_scores", "index_scores_paged"):
            self._chunks.popleft()
            self.rows = rows

    # ------------------------------------------------------------ what was found

    def report(self, op: str, provider: str, fault: Fault) -> None:
        """Count, and keep or raise (module docstring)."""
        rows = self.write_rows if fault.is_of_writes else self.rows
        for row in fault.rows or (None,):
            violation = self._violation(op, provider, fault, row, rows)
            key = op if violation.request is None else f"request {violation.request}"
            if key in self._kept:
                continue
            self.num_violations += 1
            is_known = violation.request is not None or rows.is_padding(row)
            if not (self._isolates and fault.is_contained and is_known):
                raise NumericsError(str(violation))
            self._kept[key] = violation

    def violations(self) -> tuple[Violation, ...]:
        """Those of this step, at most one for each request, and for each operator's padding."""
        return tuple(self._kept.values())

    def _violation(
        self, op: str, provider: str, fault: Fault, row: int | None, rows: CallRows
    ) -> Violation:
        place: int | None = None
        request: int | None = rows.request
        position: int | None = None
        if row is not None:
            place, request, position = rows.locate(row)
        name = None
        if request is not None:
            name = self._names[request] if request < len(self._names) else str(request)
        detail = fault.detail(-1 if row is None else row)
        return Violation(op, provider, self.layer, place, name, position, fault.rule, detail)
