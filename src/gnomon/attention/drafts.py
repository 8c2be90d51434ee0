"""Draft rows: added before verification, and kept or rejected after it.

In:  a Geometry of a whole step, draft counts, accepted counts (on the host or on the device).
Out: a Geometry with k more rows a request, or one whose rejected rows are padding rows.
Not here: drafting, sampling, the commit of cache parts (their rollback rules are the schema's).

Verify rows are ordinary rows: draft j of a request stands j positions after its last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.axes import HostLengths, RequestAxis, RowAxis, spans_of, take_rows
from gnomon.attention.geometry import Geometry, PageTable, WriteSlots
from gnomon.errors import GeometryError

__all__ = ["advance", "expand_drafts"]


def expand_drafts(geometry: Geometry, num_drafts: int | Sequence[int]) -> Geometry:
    """``num_drafts`` more rows behind each request's last row, or num_drafts[b] for request b.

    An int counts for the requests that have rows. Pages must already hold the drafts' positions.
    Other rows, padding rows too, keep their order. Needs no device value. Raises GeometryError if
    the writes are not those of the rows, if a request without rows gets drafts, if the host does
    not know a request's last row, or if the pages do not suffice.
    """
    axis, requests = geometry.rows, geometry.requests
    last = _last_rows(geometry)
    drafts = _draft_counts(num_drafts, last, axis.label)
    repeats = np.ones(axis.num_rows, dtype=np.int64)
    repeats[last[last >= 0]] += drafts[last >= 0]
    source = np.repeat(np.arange(axis.num_rows), repeats)
    offset = np.arange(len(source)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    label = f"{axis.label} > {int(drafts.sum())} drafts"
    rows = _shifted_axis(axis, source, offset, label)

    more = torch.from_numpy(drafts.astype(np.int32)).to(axis.device, non_blocking=True)
    host = requests.host
    lengths = HostLengths(
        tuple(q + k for q, k in zip(host.query_len, drafts.tolist(), strict=True)),
        tuple(kv + k for kv, k in zip(host.kv_len, drafts.tolist(), strict=True)),
        host.is_exact,
    )
    grown = RequestAxis(requests.query_len + more, requests.kv_len + more, lengths)
    writes = {
        group: WriteSlots(rows, geometry.tables[group].write_slots(rows.request, rows.position))
        for group in geometry.writes
    }
    return Geometry(grown, rows, geometry.tables, writes)


def _last_rows(geometry: Geometry) -> np.ndarray:
    """int64 [B]: the row of each request's highest position, -1 for a request without rows."""
    axis = geometry.rows
    for group, write in geometry.writes.items():
        if write.axis is not axis:
            raise GeometryError(
                f"expand_drafts of '{axis.label}': group '{group}' writes the rows of "
                f"'{write.axis.label}'; expand the whole step, before select() and shard_rows()"
            )
    last = np.full(geometry.requests.num_requests, -1, dtype=np.int64)
    top: dict[int, int] = {}
    num_rows: dict[int, int] = {}
    for span in axis.spans:
        num_rows[span.request] = num_rows.get(span.request, 0) + span.num_rows
        if span.last_position > top.get(span.request, -1):
            top[span.request] = span.last_position
            last[span.request] = span.stop - 1
    if not axis.is_exact and max(num_rows.values(), default=0) > 1:
        raise GeometryError(
            f"expand_drafts of '{axis.label}': the host does not know which row of a request is "
            "its last live one; give advance() the accepted counts on the host first"
        )
    return last


def _draft_counts(num_drafts: int | Sequence[int], last: np.ndarray, label: str) -> np.ndarray:
    if isinstance(num_drafts, int):
        counts = np.where(last >= 0, num_drafts, 0)
    else:
        counts = np.asarray(num_drafts, dtype=np.int64)
    if counts.shape != last.shape or (counts < 0).any() or (counts[last < 0] > 0).any():
        raise GeometryError(
            f"expand_drafts of '{label}': draft counts {num_drafts} for {len(last)} requests; "
            "one count >= 0 each is needed, and 0 for a request without rows"
        )
    return counts


def _shifted_axis(axis: RowAxis, source: np.ndarray, offset: np.ndarray, label: str) -> RowAxis:
    """Row i is row source[i] of ``axis``, offset[i] positions further (padding stays padding)."""
    request, position = axis.host_rows()
    request, position = request[source], position[source] + offset
    spans = spans_of(request, np.where(request >= 0, position, 0))
    index = torch.from_numpy(source).to(axis.device, non_blocking=True)
    owner = take_rows(axis.request, index, -1)
    shift = torch.from_numpy(offset.astype(np.int32)).to(axis.device, non_blocking=True)
    shift = torch.where(owner >= 0, shift, 0)
    return RowAxis(
        request=owner,
        position=take_rows(axis.position, index, 0) + shift,
        kv_len=take_rows(axis.kv_len, index, 0) + shift,
        num_live=sum(span.num_rows for span in spans),
        spans=spans,
        label=label,
        is_exact=axis.is_exact,
    )


def advance(geometry: Geometry, num_accepted: Tensor | Sequence[int]) -> Geometry:
    """After verification: keep the first num_accepted[b] of request b's rows of this step.

    The count includes the committed rows before the drafts: one committed row and two accepted
    drafts make 3; a request without drafts keeps its query_len. Rejected rows become padding rows
    where they stand, and write nowhere. Lengths shrink to the accepted tokens.

    A tensor [B] stays on the device, costs no sync, and leaves host lengths and spans as upper
    bounds (``is_exact=False``). A sequence of ints keeps them exact; it needs an exact geometry.
    """
    requests, host = geometry.requests, geometry.requests.host
    counts: tuple[int, ...] | None = None
    if isinstance(num_accepted, Tensor):
        accepted = num_accepted.to(requests.query_len.dtype)
        if tuple(accepted.shape) != (requests.num_requests,):
            raise GeometryError(
                f"advance of '{geometry.rows.label}': accepted counts of shape "
                f"{tuple(accepted.shape)} for {requests.num_requests} requests"
            )
        lengths = HostLengths(host.query_len, host.kv_len, is_exact=False)
    else:
        counts = tuple(int(count) for count in num_accepted)
        _require_counts(geometry, counts)
        accepted = torch.tensor(counts, dtype=torch.int32).to(requests.kv_len.device)
        kept = [kv - q + n for q, kv, n in zip(host.query_len, host.kv_len, counts, strict=True)]
        lengths = HostLengths(counts, tuple(kept))
    first = requests.kv_len - requests.query_len
    settled = RequestAxis(accepted, first + accepted, lengths)

    axes: dict[int, RowAxis] = {}

    def keep(axis: RowAxis) -> RowAxis:
        if id(axis) not in axes:
            axes[id(axis)] = _keep_rows(axis, settled)
        return axes[id(axis)]

    writes = {
        group: _keep_writes(geometry.tables[group], keep(w.axis), w.local and keep(w.local))
        for group, w in geometry.writes.items()
    }
    return Geometry(settled, keep(geometry.rows), geometry.tables, writes)


def _require_counts(geometry: Geometry, counts: tuple[int, ...]) -> None:
    host, label = geometry.requests.host, geometry.rows.label
    if not (host.is_exact and geometry.rows.is_exact):
        raise GeometryError(
            f"advance of '{label}' by host counts: its own lengths are upper bounds; "
            "start from the geometry that was advanced on the device"
        )
    if len(counts) != len(host.query_len) or not all(
        0 <= n <= q for n, q in zip(counts, host.query_len, strict=False)
    ):
        raise GeometryError(
            f"advance of '{label}': accepted {counts[:32]} of query lengths "
            f"{host.query_len[:32]}; each request keeps between 0 and all of its rows"
        )


def _keep_rows(axis: RowAxis, settled: RequestAxis) -> RowAxis:
    """Rows at or past their request's new kv_len become padding."""
    is_kept = axis.is_live()
    if settled.num_requests:
        is_kept &= axis.position < settled.kv_len[axis.request.clamp_min(0).long()]
    spans = axis.spans
    if settled.host.is_exact:
        trimmed = []
        for span in spans:
            room = settled.host.kv_len[span.request] - span.position
            num_rows = min(span.num_rows, max(0, -(-room // span.stride)))
            if num_rows:
                trimmed.append(span._replace(stop=span.start + num_rows))
        spans = tuple(trimmed)
    return replace(
        axis,
        request=torch.where(is_kept, axis.request, -1),
        position=torch.where(is_kept, axis.position, 0),
        kv_len=torch.where(is_kept, axis.kv_len, 0),
        num_live=sum(span.num_rows for span in spans),
        spans=spans,
        label=f"{axis.label} > advance",
        is_exact=axis.is_exact and settled.host.is_exact,
    )


def _keep_writes(table: PageTable, axis: RowAxis, local: RowAxis | None) -> WriteSlots:
    return WriteSlots(axis, table.write_slots(axis.request, axis.position), local)
