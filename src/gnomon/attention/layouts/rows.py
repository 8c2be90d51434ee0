"""Move whole rows between a paged table and a dense one, by slot.

In:  a table [num_pages, page_size, width] (any strides but the last, any dtype that the device can
     index) and slots: integers, page * page_size + offset, < 0 meaning "none".
Out: `take_rows` reads rows (zeros where there is none), `put_rows` writes them in place.
Offsets are computed in int64 throughout, so a table may be larger than 2^31 bytes.
Not here: what a row's bytes mean (the layouts).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.errors import LayoutError


def take_rows(table: Tensor, slots: Tensor) -> Tensor:
    """Read rows [..., width] of table [num_pages, page_size, width] at slots; zeros at slot < 0.

    A slot past the table is LayoutError on the CPU and a device assertion elsewhere.
    """
    flat_slots = slots.reshape(-1)
    is_none = flat_slots < 0
    # A look at the mask is free on the CPU; on an accelerator it would wait for the device.
    has_none = table.device.type != "cpu" or bool(is_none.any())
    safe = flat_slots.clamp_min(0) if has_none else flat_slots
    try:
        rows = _select(table, safe)
    except IndexError as error:
        raise _slot_error(table, slots) from error
    if has_none:
        rows.masked_fill_(is_none.unsqueeze(-1), 0)
    return rows.view(*slots.shape, table.shape[2])


def put_rows(table: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [N, width] at slots [N] of table [num_pages, page_size, width]; < 0 is skipped.

    No slot may be given twice. A slot past the table is LayoutError on the CPU.
    """
    if slots.numel() == 0:
        return
    slots = slots.to(torch.int64)
    if table.device.type == "cpu":
        if int(slots.min()) < 0:
            kept = (slots >= 0).nonzero().squeeze(-1)
            slots, rows = slots.index_select(0, kept), rows.index_select(0, kept)
    else:
        # No look at the device: a row without a slot rewrites slot 0 (in the null page, which no
        # request writes) with what is there already.
        rows = torch.where((slots < 0).unsqueeze(-1), table[0, 0], rows)
        slots = slots.clamp_min(0)
    try:
        _store(table, slots, rows)
    except IndexError as error:
        raise _slot_error(table, slots) from error


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
