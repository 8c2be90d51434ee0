"""The geometry of a step: which rows, which requests, which pages and which slots, in one value.

In:  host integers of the scheduler (``build_geometry``), or another Geometry (transforms.py).
Out: ``Geometry``, frozen and complete at birth: two axes, and for each cache group its page table
     and write slots. Everything that attention needs to know of a step is here or derived here.
Not here: cache bytes (layouts/), decisions (plan.py), changes of geometry (transforms.py).

Padding contract: request -1, position 0, kv_len 0, slot -1, index ids -1, token id 0, expert -1,
output 0, lse -inf. Slot = page * page_size + offset; page 0 is the null page and is never
written. A group may store one entry for several tokens; the token that completes an entry
writes it, and a row sees (position + 1) // tokens_per_entry entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.axes import HostLengths, RequestAxis, RowAxis, RowSpan
from gnomon.attention.geometry_check import check_geometry
from gnomon.attention.ownership import KeyOwnership
from gnomon.attention.row_tensor import RowSubset, RowTensor, rehome, require_axis
from gnomon.attention.upload import upload
from gnomon.errors import GeometryError

__all__ = [
    "Geometry",
    "HostLengths",
    "PageTable",
    "RequestAxis",
    "RowAxis",
    "RowSpan",
    "RowSubset",
    "RowTensor",
    "WriteSlots",
    "build_geometry",
    "rehome",
    "require_axis",
]

HostPages = Sequence[Sequence[int] | np.ndarray] | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of each request in one cache group: ``pages[B, N]`` int32, 0 beyond its pages.

    page_size: entries a page; tokens_per_entry: tokens that share one entry.
    window: None, or the number of last tokens that are kept; pages that lie wholly before the
    window of every row may be null.
    ownership: None, or the stripe of entries that this rank's pages hold (decode context
    parallelism); entries of other ranks have slot -1.
    """

    group: str
    pages: Tensor
    page_size: int
    tokens_per_entry: int = 1
    window: int | None = None
    ownership: KeyOwnership | None = None

    def __post_init__(self) -> None:
        if self.pages.ndim != 2 or self.pages.dtype != torch.int32:
            raise GeometryError(
                f"page table '{self.group}' is {self.pages.dtype} {tuple(self.pages.shape)}; "
                "int32 [requests, pages] is needed"
            )
        if min(self.page_size, self.tokens_per_entry) < 1 or (self.window or 1) < 1:
            raise GeometryError(
                f"page table '{self.group}': page_size {self.page_size}, tokens_per_entry "
                f"{self.tokens_per_entry}, window {self.window}; each must be at least 1"
            )

    @property
    def capacity(self) -> int:
        """Tokens that the widest request of this table can hold."""
        ranks = self.ownership.size if self.ownership else 1
        return int(self.pages.shape[1]) * self.page_size * self.tokens_per_entry * ranks

    def num_entries(self, kv_len: Tensor) -> Tensor:
        """Entries that a row with ``kv_len`` sees (an entry is seen once it is complete)."""
        return kv_len // self.tokens_per_entry

    def entry_slots(self, request: Tensor, entry: Tensor) -> Tensor:
        """int64 slots of entries ``entry`` of ``request`` (shapes broadcast).

        -1 where request or entry is negative, past the table, on the null page or another rank's.
        """
        num_pages = self.pages.shape[1]
        if self.pages.numel() == 0:
            return (request + entry).long().fill_(-1)
        entry = entry.long()
        held = (request >= 0) & (entry >= 0)
        if self.ownership is not None:
            held &= self.ownership.owner(entry) == self.ownership.rank
            entry = self.ownership.local_position(entry)
        column = torch.div(entry, self.page_size, rounding_mode="floor")
        flat = request.long().clamp_min(0) * num_pages + column.clamp(0, num_pages - 1)
        page = self.pages.view(-1)[flat.clamp_max(self.pages.numel() - 1)].long()
        slot = page * self.page_size + (entry - column * self.page_size)
        held &= (page > 0) & (column < num_pages)
        return torch.where(held, slot, -1)

    def slots(self, request: Tensor, position: Tensor) -> Tensor:
        """int64 slots of the entries that hold the tokens at ``position``; -1 where there is none.

        A padding row (request -1) has slot -1.
        """
        return self.entry_slots(request, position // self.tokens_per_entry)

    def write_slots(self, request: Tensor, position: Tensor) -> Tensor:
        """int64 slots that the tokens at ``position`` write: -1 unless a token ends its entry."""
        slots = self.slots(request, position)
        if self.tokens_per_entry == 1:
            return slots
        return torch.where((position + 1) % self.tokens_per_entry == 0, slots, -1)


@dataclass(frozen=True, slots=True, eq=False)
class WriteSlots:
    """Where the step's tokens are written: ``slots[N]`` int64 for the rows of ``axis``, -1 nowhere.

    Under context parallelism ``axis`` is the gathered axis of all ranks, rank after rank with
    each rank's padding, so that what an all-gather of per-rank tensors yields fits without
    reordering; ``local`` is this rank's block of it. None where the axis is not gathered.
    """

    axis: RowAxis
    slots: Tensor
    local: RowAxis | None = None

    def __post_init__(self) -> None:
        if self.slots.dtype != torch.int64 or tuple(self.slots.shape) != (self.axis.num_rows,):
            raise GeometryError(
                f"write slots are {self.slots.dtype} {tuple(self.slots.shape)}; int64 with one "
                f"slot for each of the {self.axis.num_rows} rows of '{self.axis.label}' is needed"
            )
        if self.local is not None and self.local.num_rows not in self.axis.rank_rows:
            raise GeometryError(
                f"write slots: local axis '{self.local.label}' has {self.local.num_rows} rows, "
                f"but the ranks of '{self.axis.label}' have {self.axis.rank_rows}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """One step, whole. ``tables`` and ``writes`` by cache group; treat both as frozen.

    ``rows`` need not be the axis of ``writes``: a subset of rows attends while all rows write,
    and a context-parallel rank writes the rows of every rank.
    """

    requests: RequestAxis
    rows: RowAxis
    tables: Mapping[str, PageTable]
    writes: Mapping[str, WriteSlots]

    def __post_init__(self) -> None:
        num_requests, host = self.requests.num_requests, self.requests.host
        for span in self.rows.spans:
            if span.request >= num_requests or (span.last_position >= host.kv_len[span.request]):
                raise GeometryError(
                    f"row axis '{self.rows.label}': {span} does not fit its {num_requests} "
                    f"requests with kv lengths {host.kv_len[:16]}"
                )
        longest = max(host.kv_len, default=0)
        for group, table in self.tables.items():
            if table.group != group or table.pages.shape[0] != num_requests:
                raise GeometryError(
                    f"page table under key '{group}' is of group '{table.group}' with "
                    f"{table.pages.shape[0]} rows; group '{group}' and {num_requests} are needed"
                )
            if table.capacity < longest // table.tokens_per_entry * table.tokens_per_entry:
                raise GeometryError(
                    f"page table '{group}' holds {table.capacity} tokens, but a request has "
                    f"{longest}; allocate its pages before the step is built"
                )
        if not self.writes.keys() <= self.tables.keys():
            raise GeometryError(
                f"writes of groups {sorted(self.writes)}, tables of {sorted(self.tables)}; "
                "a group that is written needs its table"
            )

    def check(self, num_pages: Mapping[str, int] | None = None) -> None:
        """Compare every device value with the contract and the host twins; this syncs.

        ``num_pages``: pages of each group's pool, to bound the slots. Raises GeometryError.
        """
        check_geometry(self, num_pages or {})


def build_geometry(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_tables: Mapping[str, HostPages | PageTable],
    page_size: int = 1,
    tokens_per_entry: int = 1,
    label: str = "step",
    device: torch.device | str = "cpu",
) -> Geometry:
    """The geometry of a step from host integers; rows are request after request, no padding.

    query_lens[B]: tokens computed now; kv_lens[B]: tokens after the step, so that the rows of
    request b are positions kv_len - query_len .. kv_len - 1. page_tables: for each group the
    pages of each request (lists may differ in length), of ``page_size`` entries of
    ``tokens_per_entry`` tokens; a group with other sizes is given as a PageTable.
    Raises GeometryError if lengths, tables or pages do not fit (a null page under a write too).
    """
    host = HostLengths(tuple(map(int, query_lens)), tuple(map(int, kv_lens)))
    query, kv = np.array(host.query_len, np.int32), np.array(host.kv_len, np.int32)
    stop = np.cumsum(query, dtype=np.int64)
    request = np.repeat(np.arange(len(query), dtype=np.int32), query)
    num_rows = len(request)
    position = np.arange(num_rows, dtype=np.int32) + np.repeat((kv - stop).astype(np.int32), query)
    spans = tuple(
        RowSpan(b, end - q, end, n - q)
        for b, (end, q, n) in enumerate(
            zip(stop.tolist(), host.query_len, host.kv_len, strict=True)
        )
        if q
    )
    arrays = [query, kv, request, position, position + 1]
    for group, pages in page_tables.items():
        if not isinstance(pages, PageTable):
            padded = pad_pages(group, pages, len(query))
            at = (padded, request, position)
            arrays += [padded, host_write_slots(group, (page_size, tokens_per_entry), *at)]
    placed = iter(upload(arrays, device))
    requests = RequestAxis(next(placed), next(placed), host)
    rows = RowAxis(next(placed), next(placed), next(placed), num_rows, spans, label)
    tables: dict[str, PageTable] = {}
    writes: dict[str, WriteSlots] = {}
    for group, pages in page_tables.items():
        if isinstance(pages, PageTable):
            tables[group] = pages
            slots = pages.write_slots(rows.request, rows.position)
        else:
            tables[group] = PageTable(group, next(placed), page_size, tokens_per_entry)
            slots = next(placed)
        writes[group] = WriteSlots(rows, slots)
    return Geometry(requests, rows, tables, writes)


def pad_pages(group: str, pages: HostPages, num_requests: int) -> np.ndarray:
    """int32 [B, N] with N the longest list, 0 beyond a request's pages."""
    if len(pages) != num_requests:
        raise GeometryError(
            f"page table '{group}' has pages for {len(pages)} requests, the step has {num_requests}"
        )
    if isinstance(pages, np.ndarray):
        return np.ascontiguousarray(pages, dtype=np.int32)
    widths = np.array([len(row) for row in pages], dtype=np.int64)
    width = int(widths.max(initial=0))
    padded = np.zeros((num_requests, width), dtype=np.int32)
    padded[np.arange(width) < widths[:, None]] = _concatenate(pages, int(widths.sum()))
    return padded


def _concatenate(pages: Sequence[Sequence[int] | np.ndarray], total: int) -> np.ndarray:
    """All pages in one int32 array; arrays are joined as they are, lists number by number."""
    arrays = [row for row in pages if isinstance(row, np.ndarray)]
    if arrays and len(arrays) == len(pages):
        joined: np.ndarray = np.concatenate(arrays)
        return joined.astype(np.int32, copy=False)
    rows = (row.tolist() if isinstance(row, np.ndarray) else row for row in pages)
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=total)


def host_write_slots(
    group: str,
    sizes: tuple[int, int],
    pages: np.ndarray,
    request: np.ndarray,
    position: np.ndarray,
) -> np.ndarray:
    """int64 write slots of each row by a host page table [B, N]; ``sizes``: entries a page, tokens
    an entry. Raises GeometryError where a written page is missing or null.
    """
    size, ratio = sizes
    entry = position // ratio
    column = entry // size
    is_written = (position + 1) % ratio == 0 if ratio > 1 else np.ones(len(position), dtype=bool)
    fits = column < pages.shape[1]
    page = pages[request, np.where(fits, column, 0)] if pages.size else np.zeros_like(column)
    bad = is_written & (~fits | (page <= 0))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise GeometryError(
            f"page table '{group}': request {request[row]} writes position {position[row]}, "
            f"but its page {column[row]} is missing or null (page {page[row]}); "
            "allocate its pages before the step is built"
        )
    slot = page.astype(np.int64) * size + entry % size
    return slot if ratio == 1 else np.where(is_written, slot, -1)
