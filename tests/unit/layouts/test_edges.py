"""Edges of the layouts that no ordinary step meets: one slot, one page, versions, views."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.layouts.float8 import e4m3_bound, typed_columns
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.layouts.rows import put_rows, take_rows
from gnomon.errors import LayoutError

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


@pytest.mark.parametrize("is_gapped", [False, True])
def test_the_null_page_is_written_like_any_other(is_gapped: bool) -> None:
    """A pool knows nothing of it: slot 0 beside a slot of none is written."""
    wide = torch.zeros(3, 2, 4)
    table = wide[..., :3] if is_gapped else wide
    put_rows(table, torch.tensor([-1, 0, 5]), torch.arange(3.0)[:, None].expand(3, table.shape[2]))
    assert table[:, :, 0].tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]]


def test_the_bound_of_a_code_is_half_a_unit_in_its_last_place() -> None:
    """Between 256 and 448 codes lie 32 apart, between 1 and 2 an eighth, at the bottom 2^-9."""
    values = torch.tensor([[448.0, 256.0, 1.0, 0.0]])
    assert e4m3_bound(values, torch.tensor([1.0])).tolist() == [[28.0, 16.0, 1 / 16, 2.0**-10]]
    assert e4m3_bound(values * 8, torch.tensor([8.0])).tolist() == [[224.0, 128.0, 0.5, 2.0**-7]]


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.id)
def test_pages_of_scales_begin_at_multiples_of_four_bytes(layout: KVLayout) -> None:
    assert layout.alignment == 4
    need = layout.page_bytes(3)
    assert layout.allocate(2, 3, page_stride_bytes=need + 4).page_stride_bytes == need + 4
    for gap in (1, 2, 3):
        with pytest.raises(LayoutError, match="multiples of 4 bytes"):
            layout.allocate(2, 3, page_stride_bytes=need + gap)


def test_a_pool_may_have_one_page_alone() -> None:
    layout = PlainLayout(torch.float32, 3)
    pool = PagedPool(layout, torch.zeros(1, layout.page_bytes(2), dtype=torch.uint8), 2)
    assert (pool.num_pages, pool.num_slots, pool.is_contiguous) == (1, 2, True)
    with pytest.raises(LayoutError, match="num_pages >= 1"):
        PagedPool(layout, torch.zeros(0, layout.page_bytes(2), dtype=torch.uint8), 2)


def test_aligned_columns_are_a_view_and_others_a_copy() -> None:
    rows = torch.zeros(3, 12, dtype=torch.uint8)
    assert typed_columns(rows, 4, 12, torch.float32).data_ptr() == rows.data_ptr() + 4
    shifted = torch.zeros(40, dtype=torch.uint8)[1:37].view(3, 12)
    assert typed_columns(shifted, 4, 12, torch.float32).data_ptr() != shifted.data_ptr() + 4


def test_a_plain_pool_is_the_entries_it_is_made_of() -> None:
    entries = torch.arange(24, dtype=torch.bfloat16).view(8, 3)
    layout = PlainLayout(torch.bfloat16, 3)
    pool = layout.pool_of(entries, 4)
    assert pool.num_pages == 2
    assert torch.equal(layout.gather(pool, torch.arange(8)), entries)
    layout.write(pool, torch.tensor([5]), torch.zeros(1, 3))
    assert not entries[5].any()  # shared, not copied
    for wrong in (entries[:7], entries.float(), entries.T, entries[:, :2]):
        with pytest.raises(LayoutError, match="contiguous entries"):
            layout.pool_of(wrong, 4)
