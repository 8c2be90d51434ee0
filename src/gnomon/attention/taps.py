"""Taps: the hook through which the two discrete choices of a model can be recorded or replayed.

In:  a layer's selection of keys and of experts, with the margins of both choices.
Out: the choice that the layer goes on with: its own, or a recorded one (oracle_math.md §3.4, where
     bf16 is compared with choices replayed from fp32, and design.md §9, the margin rule).
Recordings are kept per request name and position, so that one taken from a whole prompt can be
replayed chunk by chunk, in any batch. Not here: how to compare two recordings (gnomon.verify).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.geometry import RowAxis
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.ops.values import Selection
from gnomon.errors import GeometryError

Choices = dict[tuple[int, str], Tensor]  # (layer, request name) → [positions, width], −1 padded


class SelectionTap(Protocol):
    """Sees every discrete choice of a forward pass and returns the one to use."""

    wants_margin: bool

    def begin_step(self, rows: RowAxis, request_ids: Sequence[str]) -> None:
        """A step begins: its row axis, and the name of each request index of that axis."""

    def index(self, layer: int, selection: Selection) -> KeySet:
        """The keys that the rows of ``selection.keys.axis`` shall attend in this layer."""

    def experts(self, layer: int, expert_ids: Tensor, margin: Tensor) -> Tensor:
        """The experts [R, k] that the step's rows shall use; ``margin`` [R] of the router."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Choices by (layer, request name): row p of a tensor is the choice at position p.

    ``index`` [T, W] int32 positions, ``experts`` [T, k] int64, both −1 where nothing was seen;
    the margins [T] float64, +inf where nothing was seen or nothing was cut. All on the host.
    """

    index: Choices = field(default_factory=dict)
    experts: Choices = field(default_factory=dict)
    index_margin: Choices = field(default_factory=dict)
    expert_margin: Choices = field(default_factory=dict)


class RecordingTap:
    """Lets every choice pass and keeps it; a later row at a position replaces the earlier.

    Keeping is cheap; `recording` sorts everything by request, each time that it is asked for.
    """

    def __init__(self, *, wants_margin: bool = True) -> None:
        self.wants_margin = wants_margin
        self._rows: RowAxis | None = None
        self._names: tuple[str, ...] = ()
        self._index: list[_Seen] = []
        self._experts: list[_Seen] = []

    @property
    def recording(self) -> Recording:
        """All choices so far. Margins only where they were asked for (`wants_margin`)."""
        return Recording(
            index=_by_request([(seen, seen.chosen) for seen in self._index], -1),
            experts=_by_request([(seen, seen.chosen) for seen in self._experts], -1),
            index_margin=_margins(self._index),
            expert_margin=_margins(self._experts),
        )

    def begin_step(self, rows: RowAxis, request_ids: Sequence[str]) -> None:
        """Take the names of this step's requests."""
        self._rows, self._names = rows, tuple(request_ids)

    def index(self, layer: int, selection: Selection) -> KeySet:
        """Keep the lists (and margins) of all live rows; return them unchanged."""
        keys = selection.keys
        ids = _only_list(keys).ids
        self._index.append(_Seen(layer, keys.axis, self._names, ids, selection.margin))
        return keys

    def experts(self, layer: int, expert_ids: Tensor, margin: Tensor) -> Tensor:
        """Keep the experts of all live rows; return them unchanged."""
        rows = _begun(self._rows)
        kept = margin if self.wants_margin else None
        self._experts.append(_Seen(layer, rows, self._names, expert_ids, kept))
        return expert_ids


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """One layer's choices in one step: chosen [R, W], margin [R] if asked for."""

    layer: int
    axis: RowAxis
    names: tuple[str, ...]
    chosen: Tensor
    margin: Tensor | None


def _margins(seen: list[_Seen]) -> Choices:
    asked = [(one, one.margin[:, None]) for one in seen if one.margin is not None]
    columns = _by_request([(one, margin.double()) for one, margin in asked], torch.inf)
    return {key: column[:, 0] for key, column in columns.items()}


def _by_request(seen: list[tuple[_Seen, Tensor]], empty: float) -> Choices:
    """Rows of all steps, sorted into one tensor [positions, width] per layer and request."""
    found: Choices = {}
    for layer in sorted({one.layer for one, _ in seen}):
        steps = [(one, values) for one, values in seen if one.layer == layer]
        width = max(values.shape[1] for _, values in steps)
        names = sorted({name for one, _ in steps for name in one.names})
        number = {name: index for index, name in enumerate(names)}
        owners, positions = [], []
        for one, _ in steps:
            request, position = one.axis.host_rows()
            numbers = np.array([number[name] for name in one.names] + [-1])
            owners.append(numbers[request])  # a padding row has request −1: the last number
            positions.append(position)
        owner, position = np.concatenate(owners), np.concatenate(positions)
        wide = [_widened(values, width, empty).cpu().numpy() for _, values in steps]
        rows = np.concatenate(wide)
        for name, index in number.items():
            own = np.flatnonzero(owner == index)
            if len(own):
                kept = np.full((position[own].max() + 1, width), empty, dtype=rows.dtype)
                kept[position[own]] = rows[own]  # in order of time: the last one stays
                found[layer, name] = torch.from_numpy(kept)
    return found


def _widened(values: Tensor, width: int, empty: float) -> Tensor:
    missing = width - values.shape[1]
    return torch.nn.functional.pad(values.detach(), (0, missing), value=empty)


class ReplayTap:
    """Answers every choice with the recorded one; a row that was not recorded is an error."""

    wants_margin = False

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._rows: RowAxis | None = None
        self._names: tuple[str, ...] = ()

    def begin_step(self, rows: RowAxis, request_ids: Sequence[str]) -> None:
        """Take the names of this step's requests."""
        self._rows, self._names = rows, tuple(request_ids)

    def index(self, layer: int, selection: Selection) -> KeySet:
        """The recorded lists on the selection's axis; its own where the layer was not recorded."""
        axis, own = selection.keys.axis, _only_list(selection.keys)
        if not any(key[0] == layer for key in self._recording.index):
            return selection.keys
        ids = self._replay(self._recording.index, layer, axis, own.ids)
        count = (ids >= 0).sum(-1, dtype=own.count.dtype)
        return KeySet(axis, (ListSegment(own.part, Space.POSITION, ids, count),), None)

    def experts(self, layer: int, expert_ids: Tensor, margin: Tensor) -> Tensor:
        """The recorded experts of the step's rows; their own where the layer was not recorded."""
        if not any(key[0] == layer for key in self._recording.experts):
            return expert_ids
        return self._replay(self._recording.experts, layer, _begun(self._rows), expert_ids)

    def _replay(self, kept: Choices, layer: int, axis: RowAxis, own: Tensor) -> Tensor:
        parts = [kept.get((layer, self._names[span.request])) for span in axis.spans]
        width = max([own.shape[1], *(part.shape[1] for part in parts if part is not None)])
        replayed = own.new_full((axis.num_rows, width), -1)
        for span, recorded in zip(axis.spans, parts, strict=True):
            num_recorded = 0 if recorded is None else recorded.shape[0]
            if recorded is None or span.last_position >= num_recorded:
                raise GeometryError(
                    f"replay: layer {layer}, request {self._names[span.request]!r} has "
                    f"{num_recorded} recorded positions, asked for position {span.last_position}"
                )
            position = axis.position[span.start : span.stop].long()
            chosen = recorded.to(own.device)[position].to(own.dtype)
            replayed[span.start : span.stop, : recorded.shape[1]] = chosen
        return replayed


def _begun(rows: RowAxis | None) -> RowAxis:
    if rows is None:
        raise GeometryError("a tap was used before begin_step(rows, request_ids) named the rows")
    return rows


def _only_list(keys: KeySet) -> ListSegment:
    segment = keys.segments[0]
    if len(keys.segments) != 1 or not isinstance(segment, ListSegment):
        raise GeometryError("a tap reads selections of exactly one list segment")
    return segment
