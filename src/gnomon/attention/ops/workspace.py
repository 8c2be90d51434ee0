"""Prefill over packed latents: the step's own context unpacked once a layer, attended as numbers.

In:  a packed pool, the rows' axis (host lengths), their page table, lists of slots.
Out: a plain pool that holds the entries of the step's requests, and the lists in its slots.
A prefill row reads every entry of its context many times over (rows x heads); kernels over plain
numbers need half the time of those that unpack on the way (gluon_feasibility.md §2, kernels.md
§1.9). What is read is the same: a layout's values are exact in the dtype that it reads in.
Not here: attention itself, who is bound (dispatch.py); decode, which reads an entry once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.geometry import PageTable
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.layouts.plain import PlainLayout

FEWEST_ROWS = 256  # below, reading the pool as it is costs less than unpacking it
MOST_ENTRIES = 1 << 18  # entries unpacked at once: 288 MiB of bf16
ROWS_PER_ENTRY = 1 / 32  # a row must be there for each 32 entries: late chunks of long prompts too

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Unpacked pages, and where the pool's pages lie in them: page_map [pool pages] int32."""

    pool: PagedPool
    page_map: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedMla:
    """``attend``: sparse_mla over a plain pool; ``gather``: context_gather of the packed one.

    ``move(slots, page_map, page_size)``: slots of the pool -> slots of the workspace, −1 stays.
    """

    attend: Kernel
    gather: Kernel
    move: Kernel

    def pays(self, pool: PagedPool, axis: RowAxis) -> bool:
        """Whether many rows of the step read so few entries that unpacking them is quicker."""
        if isinstance(pool.layout, PlainLayout) or axis.num_rows < FEWEST_ROWS:
            return False
        entries = sum(num_entries(axis).values())
        return 0 < entries <= MOST_ENTRIES and axis.num_rows >= entries * ROWS_PER_ENTRY

    def workspace(self, pool: PagedPool, axis: RowAxis, table: PageTable) -> Workspace:
        """Unpack the pages that the rows' requests have filled."""
        size = pool.page_size
        parts = [
            table.pages[request, : -(-length // size)]
            for request, length in num_entries(axis).items()
        ]
        pages = parts[0] if len(parts) == 1 else torch.cat(parts)
        count = pages.shape[0]
        entries = self.gather(pool, pages, 0, count * size)
        plain = PlainLayout(entries.dtype, pool.layout.dim).pool_of(entries, size)
        page_map = pages.new_empty(pool.num_pages)
        # A page that two requests share holds the same entries in either place.
        page_map[pages.long()] = torch.arange(count, dtype=pages.dtype, device=pages.device)
        return Workspace(plain, page_map)


def num_entries(axis: RowAxis) -> Mapping[int, int]:
    """Entries that each request of the rows has filled, by the host's lengths."""
    lengths: dict[int, int] = {}
    for span in axis.spans:
        lengths[span.request] = max(lengths.get(span.request, 0), span.last_position + 1)
    return lengths


def move_slots(slots: Tensor, page_map: Tensor, page_size: int) -> Tensor:
    """Slots [R, W] of a pool in the workspace; −1 stays. Plain torch."""
    page = slots.clamp_min(0).div(page_size, rounding_mode="floor")
    moved = page_map[page].long() * page_size + slots.clamp_min(0) % page_size
    return moved.masked_fill(slots < 0, -1)
