"""Slots are moved to a workspace as the plain function moves them."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.ops import workspace as plain
from gnomon.attention.providers.triton import workspace


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 700), (5, 2048)])
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_slots_move_alike(shape: tuple[int, int], page_size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    num_pages = 40
    slots = torch.randint(-page_size, num_pages * page_size, shape, generator=generator)
    slots = slots.clamp_min(-1)
    page_map = torch.randperm(num_pages, generator=generator).to(torch.int32)
    expected = plain.move_slots(slots, page_map, page_size)
    assert torch.equal(workspace.move_slots(slots, page_map, page_size), expected)
