"""A tap that keeps, for each request, the index lists of its last row in every step.

In:  the selections of a forward pass (attention/taps.py).
Out: `listed(request, row, wanted)`: for each layer with an indexer, whether the list of the row at
     position `row` held position `wanted`. Layers that share another's list are not asked.
The row that writes an answer's first token is the last of its prompt, so it is among those kept. A
request none of whose rows were selected for attended all its keys (routes.py): nothing is listed.
Small: one list per request, step and layer; `clear` forgets them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gnomon.attention.geometry import RowAxis
from gnomon.attention.indices import KeySet, ListSegment
from gnomon.attention.ops.values import Selection
from gnomon.errors import GeometryError


class AnsweringRows:
    """A SelectionTap that lets every choice pass."""

    wants_margin = False

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._lists: dict[tuple[str, int], dict[int, frozenset[int]]] = {}

    def begin_step(self, rows: RowAxis, request_ids: Sequence[str]) -> None:
        """Take the names of this step's requests."""
        self._names = tuple(request_ids)

    def index(self, layer: int, selection: Selection) -> KeySet:
        """Keep the lists of the last rows; return the selection's."""
        keys = selection.keys
        segment = keys.segments[0]
        if len(keys.segments) != 1 or not isinstance(segment, ListSegment):
            raise GeometryError("AnsweringRows reads selections of exactly one list segment")
        spans = keys.axis.spans
        last = [span.stop - 1 for span in spans]
        lists = segment.ids[last].tolist() if last else []
        for span, ids in zip(spans, lists, strict=True):
            row = (self._names[span.request], span.last_position)
            self._lists.setdefault(row, {})[layer] = frozenset(ids) - {-1}
        return keys

    def experts(self, layer: int, expert_ids: Tensor, margin: Tensor) -> Tensor:
        """The layer's own choice."""
        return expert_ids

    def listed(self, request_id: str, row: int, wanted: int) -> dict[int, bool]:
        """Layer -> whether its list for a row held a position; empty if there was no selection."""
        return {
            layer: wanted in ids for layer, ids in self._lists.get((request_id, row), {}).items()
        }

    def clear(self) -> None:
        """Forget all lists."""
        self._lists.clear()
