"""Edges of the layouts that no ordinary step meets: one slot, one page, versions, views."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.layouts.base import KVLayout
from gnomon.attention.layouts.float8 import typed_columns
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.layouts.rows import put_rows, take_rows

LAYOUTS = (
    PlainLayout(torch.bfloat16, 576),
    Fp8LatentLayout(512, 64),
    Fp8LatentLayout(512, 0, True),
    Fp8IndexKeyLayout(128),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_the_version_goes_with_the_golden_bytes(layout: KVLayout) -> None:
    """It is part of every prefix hash: whoever changes bytes raises it, and writes new files."""
    assert layout.version == 1


@pytest.mark.parametrize("is_gapped", [False, True])
@pytest.mark.parametrize("slots", [[-1], [-1, -1], [0], [5], []])
def test_a_lone_slot_is_read_or_is_none(slots: list[int], is_gapped: bool) -> None:
    wide = torch.arange(24.0).view(3, 2, 4) + 1
    table = wide[..., :3] if is_gapped else wide[..., :3].contiguous()
    read = take_rows(table, torch.tensor(slots, dtype=torch.int64))
    expected = [table[s // 2, s % 2].tolist() if s >= 0 else [0.0] * 3 for s in slots]
    assert read.tolist() == expected


@pytest.mark.parametrize("is_gapped", [False, True])
def test_a_lone_slot_of_none_writes_nothing(is_gapped: bool) -> None:
    wide = torch.arange(24.0).view(3, 2, 4)
    table = wide[..., :3] if is_gapped else wide
    before = table.clone()
    put_rows(table, torch.tensor([-1]), torch.full((1, table.shape[2]), 99.0))
    assert torch.equal(table, before)


def test_aligned_columns_are_a_view_and_others_a_copy() -> None:
    rows = torch.zeros(3, 12, dtype=torch.uint8)
    assert typed_columns(rows, 4, 12, torch.float32).data_ptr() == rows.data_ptr() + 4
    shifted = torch.zeros(40, dtype=torch.uint8)[1:37].view(3, 12)
    assert typed_columns(shifted, 4, 12, torch.float32).data_ptr() != shifted.data_ptr() + 4
