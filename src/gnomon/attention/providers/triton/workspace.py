"""Slots of a pool to slots of a workspace, in one launch (ops/workspace.py says what for)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def move_slots_kernel(slots, page_map, moved, num_slots, page_size, BLOCK: tl.constexpr):
    """Moved = page_map[slot // page_size] * page_size + slot % page_size; −1 stays."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < num_slots
    slot = tl.load(slots + place, mask=is_inside, other=-1)
    is_valid = slot >= 0
    page = tl.where(is_valid, slot // page_size, 0)
    target = tl.load(page_map + page, mask=is_valid, other=0).to(tl.int64)
    tl.store(
        moved + place,
        tl.where(is_valid, target * page_size + slot - page * page_size, -1),
        mask=is_inside,
    )


def move_slots(slots: Tensor, page_map: Tensor, page_size: int) -> Tensor:
    """Slots [R, W] int32 or int64 (contiguous) -> the same entries' slots in the workspace."""
    moved = torch.empty_like(slots)
    count = slots.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        move_slots_kernel[grid](slots, page_map, moved, count, page_size, BLOCK=BLOCK)
    return moved


FUSIONS = {"move_slots": move_slots}
