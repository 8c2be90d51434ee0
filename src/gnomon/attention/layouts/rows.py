"""Move whole rows between a paged table and a dense one, by slot.

In:  a table [num_pages, page_size, width] (any strides but the last, any dtype that the device can
     index) and slots: integers, page * page_size + offset, < 0 meaning "none".
Out: `take_rows` reads rows (zeros where there is none), `put_rows` writes them in place.
Offsets are computed in int64 throughout, so a table may be larger than 2^31 bytes.
Not here: what a row's bytes mean (the layouts).
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from gnomon.errors import LayoutError


def take_rows(table: Tensor, slots: Tensor) -> Tensor:
    """Read rows [..., width] of table [num_pages, page_size, width] at slots; zeros at slot < 0.

    A slot past the table is LayoutError on the CPU and a device assertion elsewhere.
    """
    flat_slots = slots.reshape(-1)
    if table.is_cpu and table.is_contiguous():
        # Most often every slot is there; torch looks at each of them anyway.
        with suppress(IndexError):
            rows = table.view(-1, table.shape[2]).index_select(0, flat_slots)
            return rows.view(*slots.shape, table.shape[2])
    # A look at the slots is cheap on the CPU; on an accelerator it would wait for the device.
    has_none = flat_slots.numel() > 0 and (not table.is_cpu or int(flat_slots.min()) < 0)
    try:
        rows = _select(table, flat_slots.clamp_min(0) if has_none else flat_slots)
    except IndexError as error:
        raise _slot_error(table, slots) from error
    if has_none and table.is_cpu:
        rows.index_fill_(0, (flat_slots < 0).nonzero().squeeze(-1), 0)
    elif has_none:
        rows.masked_fill_((flat_slots < 0).unsqueeze(-1), 0)
    return rows.view(*slots.shape, table.shape[2])


def put_rows(table: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [N, width] at slots [N] of table [num_pages, page_size, width]; < 0 is skipped.

    No slot may be given twice. A slot past the table is LayoutError on the CPU.
    """
    if slots.numel() == 0:
        return
    slots = slots.to(torch.int64)
    if not table.is_cpu:
        slots, rows = redirect_none(table, slots, rows)
    elif table.is_contiguous():
        with suppress(IndexError):  # as in take_rows; what was written is written again below
            table.view(-1, table.shape[2]).index_copy_(0, slots, rows)
            return
    if table.is_cpu and int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().squeeze(-1)
        slots, rows = slots.index_select(0, kept), rows.index_select(0, kept)
    try:
        _store(table, slots, rows)
    except IndexError as error:
        raise _slot_error(table, slots) from error


def redirect_none(table: Tensor, slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same write without slots < 0, and without a look at the device or a new shape.

    A row that has no slot rewrites slot 0 with what is there already; slot 0 is in the null page,
    which nothing else writes.
    """
    is_none = (slots < 0).unsqueeze(-1)
    return slots.clamp_min(0), torch.where(is_none, table[0, 0], rows)


def _select(table: Tensor, slots: Tensor) -> Tensor:
    if table.is_contiguous():
        return table.view(-1, table.shape[2]).index_select(0, slots)
    page_size = table.shape[1]
    wide = slots.to(torch.int64)
    return table[wide // page_size, wide % page_size]


def _store(table: Tensor, slots: Tensor, rows: Tensor) -> None:
    if table.is_contiguous():
        table.view(-1, table.shape[2]).index_copy_(0, slots, rows)
    else:
        page_size = table.shape[1]
        table[slots // page_size, slots % page_size] = rows


def _slot_error(table: Tensor, slots: Tensor) -> LayoutError:
    num_slots = table.shape[0] * table.shape[1]
    worst = int(slots.max())
    return LayoutError(
        f"slot {worst} is past the pool of {num_slots} slots ({table.shape[0]} pages of "
        f"{table.shape[1]}). Slots are page * page_size + offset; check the page table."
    )
