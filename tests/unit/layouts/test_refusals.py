"""What a layout or a pool refuses, and that the error says what would be right."""

from __future__ import annotations

import itertools

import pytest
import torch

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, KVLayout, PlainLayout
from gnomon.attention.layouts.base import PagedPool
from gnomon.errors import LayoutError

# Pairs of one width in bytes, or of one number of columns, are the dangerous ones.
LAYOUTS: list[KVLayout] = [
    PlainLayout(torch.bfloat16, 8),
    PlainLayout(torch.float16, 8),
    PlainLayout(torch.float32, 8),
    Fp8LatentLayout(8, 0),
    Fp8LatentLayout(4, 4),
    Fp8IndexKeyLayout(8),
    Fp8IndexKeyLayout(12),
]
SLOTS = torch.tensor([1])


@pytest.mark.parametrize(("made", "used"), [*itertools.permutations(LAYOUTS, 2)])
def test_reading_through_another_layout_is_an_error(made: KVLayout, used: KVLayout) -> None:
    pool = made.allocate(2, 4)
    pattern = f"pool holds {made.versioned_id}, .* as {used.versioned_id}"
    with pytest.raises(LayoutError, match=pattern):
        used.gather(pool, SLOTS)
    with pytest.raises(LayoutError, match=pattern):
        used.gather_range(pool, SLOTS, 0, 1)
    with pytest.raises(LayoutError, match=pattern):
        used.gather_bytes(pool, SLOTS)
    with pytest.raises(LayoutError, match=pattern):
        used.write(pool, SLOTS, torch.zeros(1, used.dim))
    assert not pool.storage.any()


def test_a_layout_is_a_value() -> None:
    assert PlainLayout(torch.bfloat16, 8) == PlainLayout(torch.bfloat16, 8)
    assert Fp8LatentLayout(512, 64) == Fp8LatentLayout(512, 64)
    ids = [layout.versioned_id for layout in LAYOUTS]
    assert len(set(ids)) == len(ids)
    assert Fp8LatentLayout(512, 64).versioned_id == "fp8_ds_mla_656.v1"
    assert Fp8LatentLayout(384, 130).id == "fp8_ds_mla_656_c384_r130"  # 656 bytes as well
    assert Fp8LatentLayout(64, 16).id == "fp8_ds_mla_100_c64_r16"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("slot", [8, 2**31, 2**40])
def test_slots_past_the_pool(layout: KVLayout, gap: int, slot: int) -> None:
    pool = layout.allocate(2, 4, page_stride_bytes=layout.page_bytes(4) + gap)
    with pytest.raises(LayoutError, match=f"slot {slot} is past the pool of 8 slots"):
        layout.gather(pool, torch.tensor([0, slot]))
    with pytest.raises(LayoutError, match=f"slot {slot} is past the pool of 8 slots"):
        layout.write(pool, torch.tensor([-1, slot]), torch.zeros(2, layout.dim))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_bad_reads_and_writes(layout: KVLayout) -> None:
    pool = layout.allocate(4, 4)
    pages = torch.tensor([1, 2])
    for start, length in [(0, 9), (8, 1), (5, 4), (-1, 1), (0, -1)]:
        with pytest.raises(LayoutError, match=r"range needs|pass the end"):
            layout.gather_range(pool, pages, start, length)
    with pytest.raises(LayoutError, match="range needs"):
        layout.gather_range(pool, pages[None], 0, 1)
    for values in (torch.zeros(2, layout.dim), torch.zeros(1, layout.dim + 1), torch.zeros(1)):
        with pytest.raises(LayoutError, match="at slots"):
            layout.write(pool, SLOTS, values)
    with pytest.raises(LayoutError, match="encodes floats"):
        layout.write(pool, SLOTS, torch.zeros(1, layout.dim, dtype=torch.int64))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_storage_that_does_not_fit(layout: KVLayout) -> None:
    need = layout.page_bytes(4)
    buffer = torch.zeros(8 * need + 64, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="at least 1 token"):
        PagedPool(layout, buffer[: 2 * need].view(2, need), 0)
    with pytest.raises(LayoutError, match=f"needs {need} adjoining bytes"):
        PagedPool(layout, buffer[: 2 * need - 2].view(2, need - 1), 4)
    with pytest.raises(LayoutError, match="adjoining"):
        PagedPool(layout, buffer.as_strided((2, need), (2 * need, 2)), 4)
    with pytest.raises(LayoutError, match="pages overlap"):
        PagedPool(layout, buffer.as_strided((2, need), (need - layout.alignment, 1)), 4)
    with pytest.raises(LayoutError, match="in multiples of"):
        PagedPool(layout, buffer.as_strided((2, need), (need + 1, 1)), 4)
    with pytest.raises(LayoutError, match="in multiples of"):
        PagedPool(layout, buffer[1 : 1 + 2 * need].view(2, need), 4)
    for storage in (buffer, buffer.view(torch.int8)[None], buffer[:0].view(0, need)):
        with pytest.raises(LayoutError, match="storage is uint8"):
            PagedPool(layout, storage, 4)


def test_widths_that_a_format_cannot_hold() -> None:
    for latent_dim, rope_dim in [(0, 8), (130, 8), (192, 8), (6, 8), (-4, 8), (64, 3), (64, -2)]:
        with pytest.raises(LayoutError, match=r"kv_lora_rank|qk_rope_head_dim"):
            Fp8LatentLayout(latent_dim, rope_dim)
    with pytest.raises(LayoutError, match="empty rope slot"):
        Fp8LatentLayout(512, 64, has_empty_rope_slot=True)
    for head_dim in (0, -4, 6, 127):
        with pytest.raises(LayoutError, match="index_head_dim"):
            Fp8IndexKeyLayout(head_dim)
    with pytest.raises(LayoutError, match="stores one of"):
        PlainLayout(torch.float8_e4m3fn, 8)
    with pytest.raises(LayoutError, match="at least 1 column"):
        PlainLayout(torch.float32, 0)
