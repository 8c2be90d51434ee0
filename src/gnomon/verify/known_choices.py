"""A tap that notes a layer's own choice and has it go on with a given one, where one is given.

In:  a Recording of another run; it may end before the run that is listened to.
Out: `recording`: the own choices, each made on what follows from given ones alone, so that a choice
     that differs has its cause in its own layer.
Not here: what may differ (rough_comparison.py); who insists on every row (taps.ReplayTap).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.attention.geometry import RowAxis
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.ops.values import Selection
from gnomon.attention.taps import Choices, Recording, RecordingTap


class KnownChoices:
    """A SelectionTap (module docstring)."""

    wants_margin = False

    def __init__(self, given: Recording) -> None:
        self._given = given
        self._own = RecordingTap(wants_margin=False)
        self._rows: RowAxis | None = None
        self._names: tuple[str, ...] = ()

    @property
    def recording(self) -> Recording:
        """The own choices so far."""
        return self._own.recording

    def begin_step(self, rows: RowAxis, request_ids: Sequence[str]) -> None:
        """Take the names of this step's requests."""
        self._rows, self._names = rows, tuple(request_ids)
        self._own.begin_step(rows, request_ids)

    def index(self, layer: int, selection: Selection) -> KeySet:
        """The given lists, the own ones of rows that none is given for."""
        keys = self._own.index(layer, selection)
        segment = keys.segments[0]
        assert isinstance(segment, ListSegment)
        ids = self._chosen(self._given.index, layer, keys.axis, segment.ids)
        if ids is segment.ids:
            return keys
        count = (ids >= 0).sum(-1, dtype=segment.count.dtype)
        return KeySet(keys.axis, (ListSegment(segment.part, Space.POSITION, ids, count),), None)

    def experts(self, layer: int, expert_ids: Tensor, margin: Tensor) -> Tensor:
        """The given experts, the own ones of rows that none are given for."""
        assert self._rows is not None
        self._own.experts(layer, expert_ids, margin)
        return self._chosen(self._given.experts, layer, self._rows, expert_ids)

    def _chosen(self, given: Choices, layer: int, axis: RowAxis, own: Tensor) -> Tensor:
        parts = [given.get((layer, self._names[span.request])) for span in axis.spans]
        if all(part is None for part in parts):
            return own
        width = max([own.shape[1], *(part.shape[1] for part in parts if part is not None)])
        here = own.cpu()  # one wait for a device, not one for each request
        chosen = torch.nn.functional.pad(here, (0, width - here.shape[1]), value=-1)
        position = torch.from_numpy(axis.host_rows()[1]).long()
        for span, part in zip(axis.spans, parts, strict=True):
            if part is None:
                continue
            places = position[span.start : span.stop]
            known = (places < len(part)).nonzero()[:, 0]
            wanted = part[places[known]].to(own.dtype)
            is_told = (wanted >= 0).any(-1)
            rows = span.start + known[is_told]
            chosen[rows] = -1
            chosen[rows, : part.shape[1]] = wanted[is_told]
        return chosen.to(own.device)
