"""Traps in a pool around one write: the slots to be written are poisoned, others are watched.

In:  a pool, the slots that a call shall write. Out: faults: rows whose slot still holds poison,
slots that changed though nobody should have written them, with the row whose entry landed there.
Thorough: every page is watched (of a large pool, the pages written, their neighbours and the null
page); else only the slots beside those written and the null page's first slot.
Poison is byte 0xFF in every plane of the layout. Not here: whether the entries are right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.checks.faults import Fault, Faults, Rule, always
from gnomon.attention.checks.memory import POISON_BYTE
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.layouts.rows import put_rows, take_rows

WATCHED_BYTES = 1 << 26  # a pool up to this size is copied whole


class PoolWatch:
    """Set before the call; ``faults()`` after it."""

    def __init__(self, pool: PagedPool, slots: Tensor, is_thorough: bool) -> None:
        self._pool = pool
        self._slots = slots
        self._rows = (slots >= 0).nonzero()[:, 0]
        self._written = slots.index_select(0, self._rows).long()
        is_small = pool.storage.numel() <= WATCHED_BYTES
        self._copy = pool.storage.clone() if is_thorough and is_small else None
        if self._copy is None:
            self._watched = self._nearby(is_thorough)
            self._before = self._read(pool, self._watched)
        for plane in pool.planes:
            poison = plane.new_full((self._written.shape[0], plane.shape[2]), POISON_BYTE)
            put_rows(plane, self._written, poison)

    def faults(self) -> Faults:
        """Slots left unwritten and slots written by mistake."""
        entries = self._read(self._pool, self._written)
        left = (entries == POISON_BYTE).all(1)
        stray = self._stray()
        if bool(left.any()):
            rows = self._rows[left]
            elsewhere = f"; slot {int(stray[0])} changed instead" if stray.numel() else ""

            def missing(row: int) -> str:
                return f"slot {int(self._slots[row])} was not written{elsewhere}"

            yield Fault(Rule.SLOT_WRITTEN, tuple(rows.tolist()), missing, False, True)
        elif stray.numel():
            yield self._stray_fault(stray, entries)

    def _stray(self) -> Tensor:
        """Slots that changed and should not have."""
        pool = self._pool
        if self._copy is None:
            after = self._read(pool, self._watched)
            return self._watched[(after != self._before).any(1)]
        pages = (_words(pool.storage) != _words(self._copy)).any(1).nonzero()[:, 0]
        slots = self._slots_of(pages)
        before = PagedPool(pool.layout, self._copy, pool.page_size)
        changed = (self._read(pool, slots) != self._read(before, slots)).any(1)
        slots = slots[changed]
        return slots[~torch.isin(slots, self._written)]

    def _stray_fault(self, stray: Tensor, entries: Tensor) -> Fault:
        slot = int(stray[0])
        same = (entries == self._read(self._pool, stray[:1])).all(1).nonzero()[:, 0]
        rows = tuple(self._rows[same].tolist())
        page, offset = divmod(slot, self._pool.page_size)
        text = f"slot {slot} (page {page}, offset {offset}) changed; it is no row's to write"
        return Fault(Rule.STRAY, rows, always(text), False, True)

    def _slots_of(self, pages: Tensor) -> Tensor:
        inside = torch.arange(self._pool.page_size, device=pages.device)
        return (pages[:, None] * self._pool.page_size + inside).flatten()

    def _nearby(self, is_thorough: bool) -> Tensor:
        """int64 slots to watch where not all are: none of those to be written."""
        pool, written = self._pool, self._written
        beside = torch.cat((written - 1, written + 1, written.new_zeros(1)))
        if is_thorough:
            page = written // pool.page_size
            page = torch.unique(torch.cat((page, page + 1, page - 1, page.new_zeros(1))))
            beside = self._slots_of(page)
        beside = beside[(beside >= 0) & (beside < pool.num_slots)]
        return beside[~torch.isin(beside, written)]

    @staticmethod
    def _read(pool: PagedPool, slots: Tensor) -> Tensor:
        """Bytes of slots [n]: uint8 [n, bytes per token]; a copy."""
        parts = [take_rows(plane, slots) for plane in pool.planes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _words(storage: Tensor) -> Tensor:
    """Pages in units of 8 bytes where they come out even: an eighth of the numbers to compare."""
    is_even = storage.shape[1] % 8 == 0 and storage.stride(0) % 8 == 0
    return storage.view(torch.int64) if is_even and storage.storage_offset() % 8 == 0 else storage
