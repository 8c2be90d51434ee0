"""The two axes of a step: its requests and its rows, with host twins that planning may read.

In:  int32 tensors (one entry a request, or one a row) and host integers that describe them.
Out: frozen values ``RequestAxis`` and ``RowAxis``; every per-row tensor names the RowAxis that it
     belongs to (row_tensor.py), every change of an axis makes a new one (transforms.py).
Not here: pages and slots (geometry.py), index lists (indices.py), decisions (routes.py, plan.py).

Each query row is its own one-token sequence with its own kv_len; there is no mode. A padding row
has request -1, position 0, kv_len 0. Birth checks read shapes, dtypes and host twins only, never
device values; ``Geometry.check()`` compares those with the twins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnomon.errors import GeometryError

__all__ = ["HostLengths", "RequestAxis", "RowAxis", "RowSpan", "spans_of", "take_axis", "take_rows"]


@dataclass(frozen=True, slots=True)
class HostLengths:
    """Host twins of the lengths of B requests, in tokens.

    ``is_exact=False``: upper bounds, because the true value is known on the device alone
    (overlapped speculation). An upper bound may size a buffer; it never decides a route.
    """

    query_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    is_exact: bool = True

    def __post_init__(self) -> None:
        if len(self.query_len) != len(self.kv_len):
            raise GeometryError(
                f"host lengths disagree: {len(self.query_len)} query lengths, "
                f"{len(self.kv_len)} kv lengths; one of each for every request is needed"
            )
        for b, (q, kv) in enumerate(zip(self.query_len, self.kv_len, strict=True)):
            if not 0 <= q <= kv:
                raise GeometryError(
                    f"request {b}: query_len {q}, kv_len {kv}; allowed is 0 <= query_len <= kv_len "
                    "(kv_len counts the tokens that this step writes)"
                )


@dataclass(frozen=True, slots=True, eq=False)
class RequestAxis:
    """The B requests of a step. ``query_len[B]``, ``kv_len[B]`` int32, in tokens.

    query_len: tokens of the request that the step computes, over all ranks. kv_len: tokens of
    the request after the step's writes. A request may have zero rows on a given RowAxis.
    """

    query_len: Tensor
    kv_len: Tensor
    host: HostLengths

    def __post_init__(self) -> None:
        expected = (len(self.host.query_len),)
        for name, tensor in (("query_len", self.query_len), ("kv_len", self.kv_len)):
            _require_vector(f"RequestAxis.{name}", tensor, expected[0])
        if self.query_len.device != self.kv_len.device:
            raise GeometryError(
                f"RequestAxis lies on two devices: query_len on {self.query_len.device}, "
                f"kv_len on {self.kv_len.device}"
            )

    @property
    def num_requests(self) -> int:
        return len(self.host.query_len)


class RowSpan(NamedTuple):
    """Rows ``start .. stop-1`` belong to ``request``; row start+i is at ``position + i * stride``.

    The host twin of the row -> request map. A request may have several spans (zig-zag shards);
    stride is above 1 where rows are dealt round-robin over ranks.
    """

    request: int
    start: int
    stop: int
    position: int
    stride: int = 1

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def last_position(self) -> int:
        return self.position + (self.stop - self.start - 1) * self.stride


@dataclass(frozen=True, slots=True, eq=False)
class RowAxis:
    """The R query rows of a step, padded. Two axes are the same only if they are one object.

    request, position, kv_len: int32 [R] on one device; a row is live iff request >= 0, and then
    kv_len = position + 1. Live rows need not be a prefix. ``spans`` ascend by start and do not
    overlap; rows outside all spans are padding. ``num_live`` = rows inside spans.
    ``is_exact=False``: spans and positions are an upper bound, because the device alone knows
    which rows of a span are live or where they stand (after ``advance``).
    ``rank_rows``: rows of each rank, in rank order, where the axis was gathered over ranks.
    ``label`` tells the axis' history for error messages ("step 12 > select 7 of 19 > pad 20").
    """

    request: Tensor = field(repr=False)
    position: Tensor = field(repr=False)
    kv_len: Tensor = field(repr=False)
    num_live: int
    spans: tuple[RowSpan, ...] = field(repr=False)
    label: str
    is_exact: bool = True
    rank_rows: tuple[int, ...] = ()
    num_rows: int = field(init=False, repr=False)
    device: torch.device = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_rows = self.request.shape[0] if self.request.ndim == 1 else -1
        object.__setattr__(self, "num_rows", max(num_rows, 0))
        object.__setattr__(self, "device", self.request.device)
        for name in ("request", "position", "kv_len"):
            tensor = getattr(self, name)
            _require_vector(f"{name} of row axis '{self.label}'", tensor, num_rows)
            if tensor.device != self.request.device:
                raise GeometryError(
                    f"row axis '{self.label}' lies on two devices: request on "
                    f"{self.request.device}, {name} on {tensor.device}"
                )
        self._check_spans(num_rows)
        if self.rank_rows and (sum(self.rank_rows) != num_rows or min(self.rank_rows) < 0):
            raise GeometryError(
                f"row axis '{self.label}' has {num_rows} rows, but rank_rows {self.rank_rows} "
                f"add up to {sum(self.rank_rows)}"
            )

    def _check_spans(self, num_rows: int) -> None:
        end = total = 0
        for span in self.spans:
            request, start, stop, position, stride = span
            if not (end <= start < stop <= num_rows and request >= 0 and position >= 0 < stride):
                raise GeometryError(
                    f"row axis '{self.label}': bad {span}; spans ascend, do not overlap, end by "
                    f"row {num_rows}, and have request >= 0, position >= 0, stride >= 1"
                )
            end = stop
            total += stop - start
        if total != self.num_live:
            raise GeometryError(
                f"row axis '{self.label}': num_live is {self.num_live}, its spans hold {total} rows"
            )

    def is_live(self) -> Tensor:
        """Which rows are real: bool [R] on the device."""
        return self.request >= 0

    def host_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(request, position) as int64 [R] host arrays; -1 and 0 for padding. No device access."""
        request = np.full(self.num_rows, -1, dtype=np.int64)
        position = np.zeros(self.num_rows, dtype=np.int64)
        for b, start, stop, first, stride in self.spans:
            request[start:stop] = b
            position[start:stop] = np.arange(first, first + (stop - start) * stride, stride)
        return request, position

    def host_live_rows(self) -> np.ndarray:
        """int64 [num_live]: rows inside spans, ascending. No device access."""
        if not self.spans:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in self.spans])

    def live_rows(self) -> Tensor:
        """int64 [num_live] on the axis' device: ``host_live_rows`` as a tensor. No sync."""
        return torch.from_numpy(self.host_live_rows()).to(self.device, non_blocking=True)


def spans_of(request: np.ndarray, position: np.ndarray) -> tuple[RowSpan, ...]:
    """Spans of host rows (request -1 = padding): greedy runs of one request and one stride."""
    num_rows = len(request)
    if num_rows == 0:
        return ()
    step = np.diff(position)
    joins = (request[1:] == request[:-1]) & ((step > 0) | (request[1:] < 0))
    turns = np.zeros(max(num_rows - 1, 1), dtype=np.int64)  # how often the step changed so far
    turns[1:] = np.cumsum(step[1:] != step[:-1])
    edges = [0, *(np.flatnonzero(~joins) + 1).tolist(), num_rows]
    spans: list[RowSpan] = []
    for start, stop in pairwise(edges):
        owner = int(request[start])
        if owner < 0:
            continue
        if stop - start <= 2 or turns[stop - 2] == turns[start]:
            stride = int(step[start]) if stop - start > 1 else 1
            spans.append(RowSpan(owner, start, stop, int(position[start]), stride))
        else:
            spans.extend(_uneven_spans(owner, start, position[start:stop].tolist()))
    return tuple(spans)


def _uneven_spans(request: int, start: int, positions: list[int]) -> list[RowSpan]:
    spans: list[RowSpan] = []
    first = 0
    while first < len(positions):
        last = first
        stride = positions[first + 1] - positions[first] if first + 1 < len(positions) else 1
        while last + 1 < len(positions) and positions[last + 1] - positions[last] == stride:
            last += 1
        row = start + first
        spans.append(RowSpan(request, row, start + last + 1, positions[first], stride))
        first = last + 1
    return spans


def take_axis(axis: RowAxis, source: np.ndarray, label: str) -> RowAxis:
    """The axis whose row i is row ``source[i]`` (int64 host) of ``axis``; -1 makes a padding row.

    Exact where ``axis`` is exact. ``source`` must be in range; no row may be named twice.
    """
    request, position = axis.host_rows()
    is_row = source >= 0
    at = np.where(is_row, source, 0)
    spans: tuple[RowSpan, ...] = ()
    if axis.num_rows:
        spans = spans_of(np.where(is_row, request[at], -1), np.where(is_row, position[at], 0))
    index = torch.from_numpy(source).to(axis.device, non_blocking=True)
    return RowAxis(
        request=take_rows(axis.request, index, -1),
        position=take_rows(axis.position, index, 0),
        kv_len=take_rows(axis.kv_len, index, 0),
        num_live=sum(span.num_rows for span in spans),
        spans=spans,
        label=label,
        is_exact=axis.is_exact,
    )


def take_rows(data: Tensor, source: Tensor, fill: float) -> Tensor:
    """``data[source]`` along dim 0, rows of ``fill`` where source is -1. Any dtype, any device."""
    if data.shape[0] == 0:
        return data.new_full((source.shape[0], *data.shape[1:]), fill)
    taken = data.index_select(0, source.clamp_min(0))
    shape = (-1,) + (1,) * (data.ndim - 1)
    return taken.masked_fill_((source < 0).view(shape), fill)


def _require_vector(name: str, tensor: Tensor, length: int) -> None:
    if tensor.dtype != torch.int32 or tensor.ndim != 1 or tensor.shape[0] != length:
        raise GeometryError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; "
            f"int32 with {max(length, 0)} entries in one dimension is needed"
        )
