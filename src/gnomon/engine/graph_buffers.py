"""GraphBuffers: device memory of fixed addresses that captured decode steps read.

In:  sizes: the largest bucket, the pages of the longest request, the cache groups. Per step a
     DecodeBatch, and which of its tokens the device itself has just sampled.
Out: `rows(bucket)`, `token_ids(bucket)`: views that stay where they are for the buffers' life;
     `refresh(batch)` makes them describe a step: one pinned copy, and one copy on the device for
     each cache group that spreads the page table, which is as wide as the longest live request.
Layout of the one buffer: a line of `max_rows` for every per-row value, then the page tables as the
host sends them. Every bucket reads the first entries of the same lines. What stands behind the live
rows of a bucket is padding (request -1, position 0, kv_len 0, slot -1, token 0); page numbers there
and behind a request's own pages are old ones and are read by nobody.
Not here: what runs on them (graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.attention.decode_plan import StaticRows
from gnomon.attention.upload import ALIGNMENT, torch_dtype
from gnomon.engine.batch import DecodeBatch
from gnomon.errors import GeometryError


@dataclass(frozen=True, slots=True)
class _Line:
    """A per-row value: where it starts in the buffer, its dtype, and what padding rows hold."""

    start: int
    dtype: np.dtype
    padding: int


class GraphBuffers:
    """The owner of the buffers (module docstring)."""

    def __init__(
        self, groups: Sequence[str], max_rows: int, max_pages: int, device: torch.device
    ) -> None:
        self.max_rows, self.max_pages = max_rows, max_pages
        self._groups = tuple(groups)
        self._lines: dict[str, _Line] = {}
        self._end = 0
        for name, dtype, padding in (
            ("token_ids", np.int64, 0),
            ("feed", np.int64, -1),
            *((f"slots {group}", np.int64, -1) for group in groups),
            ("request", np.int32, -1),
            ("position", np.int32, 0),
            ("kv_len", np.int32, 0),
            ("query_len", np.int32, 0),
        ):
            line = self._lines[name] = _Line(self._end, np.dtype(dtype), padding)
            num_bytes = max_rows * line.dtype.itemsize
            self._end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        table_bytes = max_rows * max_pages * 4
        self._is_pinned = device.type == "cuda"
        self._bytes = torch.zeros(
            self._end + table_bytes * len(groups), dtype=torch.uint8, device=device
        )
        for name, line in self._lines.items():
            self._line(name, max_rows).fill_(line.padding)  # what a capture finds
        self._pages = {
            group: torch.zeros((max_rows, max_pages), dtype=torch.int32, device=device)
            for group in groups
        }
        # What the sampler chose last: row i of the step before, for tokens the host has not seen.
        self.sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        tables = sum(pages.nbytes for pages in self._pages.values())
        return self._bytes.nbytes + tables + self.sampled.nbytes

    def rows(self, bucket: int) -> StaticRows:
        """The first `bucket` rows of every line."""
        view = {name: self._line(name, bucket) for name in self._lines}
        return StaticRows(
            request=view["request"],
            position=view["position"],
            kv_len=view["kv_len"],
            query_len=view["query_len"],
            pages={group: self._pages[group][:bucket] for group in self._groups},
            slots={group: view[f"slots {group}"] for group in self._groups},
        )

    def token_ids(self, bucket: int) -> Tensor:
        """int64 [bucket]: what the host sent, or the device sampled in the step before.

        Work on the device: part of what is captured.
        """
        sent, feed = self._line("token_ids", bucket), self._line("feed", bucket)
        return torch.where(feed < 0, sent, self.sampled.index_select(0, feed.clamp_min(0)))

    def refresh(self, batch: DecodeBatch, feed: NDArray[np.int64] | None = None) -> None:
        """Make the first `batch.bucket` rows describe this step; waits for nothing.

        feed[b] >= 0: row b's token is what the step before sampled in its row feed[b].
        """
        num_live = len(batch.token_ids)
        widths = {group: batch.pages[group].shape[1] for group in self._groups}
        if not num_live <= batch.bucket <= self.max_rows or max(widths.values()) > self.max_pages:
            raise GeometryError(
                f"graph buffers of {self.max_rows} rows and {self.max_pages} pages cannot hold "
                f"{num_live} rows in a bucket of {batch.bucket} with {widths} pages"
            )
        total = self._end + sum(4 * num_live * width for width in widths.values())
        staging = torch.empty(total, dtype=torch.uint8, pin_memory=self._is_pinned)
        host = staging.numpy()
        values: dict[str, NDArray[np.int64] | NDArray[np.int32] | int | None] = {
            "token_ids": batch.token_ids,
            "feed": feed,
            "request": np.arange(num_live, dtype=np.int32),
            "position": batch.kv_len - 1,
            "kv_len": batch.kv_len,
            "query_len": 1,
            **{f"slots {group}": batch.slots[group] for group in self._groups},
        }
        for name, value in values.items():
            line = self._lines[name]
            stop = line.start + batch.bucket * line.dtype.itemsize
            there = host[line.start : stop].view(line.dtype)
            there[:num_live] = line.padding if value is None else value
            there[num_live:] = line.padding
        start = self._end
        for group, width in widths.items():
            stop = start + 4 * num_live * width
            host[start:stop].view(np.int32).reshape(num_live, width)[:] = batch.pages[group]
            start = stop
        self._bytes[:total].copy_(staging, non_blocking=True)
        self._spread_tables(num_live, widths)

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are."""
        held = (self._bytes, *self._pages.values(), self.sampled)
        return tuple(tensor.data_ptr() for tensor in held)

    def _line(self, name: str, bucket: int) -> Tensor:
        line = self._lines[name]
        stop = line.start + bucket * line.dtype.itemsize
        return self._bytes[line.start : stop].view(torch_dtype(line.dtype))

    def _spread_tables(self, num_live: int, widths: dict[str, int]) -> None:
        start = self._end
        for group, width in widths.items():
            stop = start + 4 * num_live * width
            if stop > start:
                sent = self._bytes[start:stop].view(torch.int32).view(num_live, width)
                self._pages[group][:num_live, :width].copy_(sent)
            start = stop
