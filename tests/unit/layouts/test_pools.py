"""Pools of every layout: writes and reads at any slot, page size, stride and offset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, KVLayout, PlainLayout
from gnomon.attention.layouts.base import PagedPool
from gnomon.errors import LayoutError

# Each layout with the widths of its planes, stated here a second time on purpose.
CASES: list[tuple[KVLayout, tuple[int, ...]]] = [
    (PlainLayout(torch.float32, 5), (20,)),
    (PlainLayout(torch.bfloat16, 7), (14,)),
    (PlainLayout(torch.float16, 4), (8,)),
    (PlainLayout(torch.float64, 3), (24,)),
    (Fp8LatentLayout(8, 4), (20,)),
    (Fp8LatentLayout(256, 2), (268,)),
    (Fp8LatentLayout(4, 0, has_empty_rope_slot=True), (136,)),
    (Fp8IndexKeyLayout(8), (8, 4)),
]
LAYOUTS = [layout for layout, _ in CASES]
NAMES = [layout.id for layout in LAYOUTS]
FILL = 0xA5


@dataclass(frozen=True)
class PoolCase:
    layout: KVLayout
    widths: tuple[int, ...]
    num_pages: int
    page_size: int
    gap: int  # bytes between a page's content and the next page
    lead: int  # bytes of a larger buffer before the pool

    def pool(self) -> tuple[PagedPool, Tensor]:
        """The pool, and the whole buffer that it is a slice of; every byte is FILL."""
        page_bytes = self.page_size * sum(self.widths)
        stride = page_bytes + self.gap
        buffer = torch.full((self.lead + self.num_pages * stride,), FILL, dtype=torch.uint8)
        pages = buffer[self.lead :].view(self.num_pages, stride)
        return PagedPool(self.layout, pages[:, :page_bytes], self.page_size), buffer

    def place(self, buffer: bytearray, slot: int, row: bytes) -> None:
        """Put a token's bytes where the format says: plane after plane within the page."""
        page, offset = divmod(slot, self.page_size)
        stride = self.page_size * sum(self.widths) + self.gap
        plane = self.lead + page * stride
        for width in self.widths:
            begin = plane + offset * width
            buffer[begin : begin + width], row = row[:width], row[width:]
            plane += self.page_size * width


@st.composite
def pool_cases(draw: st.DrawFn) -> PoolCase:
    layout, widths = draw(st.sampled_from(CASES))
    unit = layout.alignment
    page_size = draw(st.integers(1, 6))
    if (page_size * sum(widths)) % unit:
        page_size = 4
    gap = unit * draw(st.sampled_from([0, 0, 1, 3, 2 * sum(widths)]))
    gap -= (page_size * sum(widths) + gap) % unit
    lead = unit * draw(st.sampled_from([0, 1, 5]))
    return PoolCase(layout, widths, draw(st.integers(1, 5)), page_size, gap, lead)


def random_values(layout: KVLayout, count: int, seed: int) -> Tensor:
    return torch.randn(count, layout.dim, generator=torch.Generator().manual_seed(seed))


@given(case=pool_cases(), data=st.data())
def test_pool_equals_a_dict(case: PoolCase, data: st.DataObject) -> None:
    """Any writes leave exactly the written tokens changed, to the byte; reads return them."""
    layout = case.layout
    pool, buffer = case.pool()
    expected = bytearray(bytes(buffer.tolist()))
    model: dict[int, list[float]] = {}
    for step in range(data.draw(st.integers(1, 3))):
        slots = data.draw(
            st.lists(st.integers(0, pool.num_slots - 1), unique=True, max_size=6).flatmap(
                lambda real: st.permutations(real + [-1] * (len(real) % 3))
            )
        )
        dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
        values = random_values(layout, len(slots), seed=step)
        layout.write(pool, torch.tensor(slots, dtype=dtype), values)
        rows = layout.quantise(values)
        for slot, row, value in zip(slots, rows, layout.dequantise(rows), strict=True):
            if slot >= 0:
                case.place(expected, slot, bytes(row.tolist()))
                model[slot] = value.tolist()
    assert bytes(buffer.tolist()) == bytes(expected)
    wanted = data.draw(st.permutations([*model, -1, -5]))
    got = layout.gather(pool, torch.tensor(wanted))
    assert got.dtype == layout.computed_dtype
    assert got.tolist() == [model.get(slot, [0.0] * layout.dim) for slot in wanted]


@given(case=pool_cases(), data=st.data())
def test_range_equals_its_slots(case: PoolCase, data: st.DataObject) -> None:
    """gather_range reads what gather reads at the same places, from any start in a page."""
    layout = case.layout
    pool, _ = case.pool()
    count = pool.num_slots
    layout.write(pool, torch.arange(count), random_values(layout, count, seed=3))
    pages = data.draw(st.lists(st.integers(0, case.num_pages - 1), max_size=6))
    total = len(pages) * case.page_size
    start = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - start))
    places = range(start, start + length)
    slots = [pages[p // case.page_size] * case.page_size + p % case.page_size for p in places]
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
    table = torch.tensor(pages, dtype=dtype)
    by_slot = torch.tensor(slots, dtype=torch.int64)
    got = layout.gather_range(pool, table, start, length)
    assert got.shape == (length, layout.dim)
    assert got.equal(layout.gather(pool, by_slot))
    raw = layout.gather_range_bytes(pool, table, start, length)
    assert raw.equal(layout.gather_bytes(pool, by_slot))
    assert layout.dequantise(raw).equal(got)


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
@given(seed=st.integers(0, 2**16), exponent=st.integers(-12, 30))
def test_round_trip_within_the_bound(layout: KVLayout, seed: int, exponent: int) -> None:
    is_half = layout.stored_dtype == torch.float16  # its range ends at 65504
    scale = 2.0 ** (exponent if not is_half else exponent / 8)
    values = random_values(layout, 3, seed) * scale
    wide = layout.computing_in(torch.float64)
    error = (wide.dequantise(wide.quantise(values)) - values.double()).abs()
    assert (error <= layout.round_trip_bound(values)).all()
    doubles = values.double() * (1 + 2.0**-30)
    error = (wide.dequantise(wide.quantise(doubles)) - doubles).abs()
    assert (error <= layout.round_trip_bound(doubles)).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_a_second_trip_changes_nothing(layout: KVLayout) -> None:
    wide = layout.computing_in(torch.float64)
    once = wide.dequantise(wide.quantise(random_values(layout, 50, seed=4)))
    assert wide.dequantise(wide.quantise(once)).equal(once)


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_shapes_of_reads(layout: KVLayout) -> None:
    pool = layout.allocate(3, 4)
    assert pool.storage.shape == (3, 4 * layout.bytes_per_token)
    assert layout.gather(pool, torch.full((2, 3, 5), -1)).shape == (2, 3, 5, layout.dim)
    assert layout.gather(pool, torch.zeros((0,), dtype=torch.int64)).shape == (0, layout.dim)
    assert layout.gather(pool, torch.zeros((2, 0), dtype=torch.int64)).shape == (2, 0, layout.dim)
    layout.write(pool, torch.zeros((0,), dtype=torch.int64), torch.zeros(0, layout.dim))
    assert not layout.gather(pool, torch.arange(12)).any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
@pytest.mark.parametrize("stride_gib", [1, 2])
def test_offsets_past_two_and_four_gib(layout: KVLayout, stride_gib: int) -> None:
    """Page strides of 1 and 2 GiB put the last pages beyond 2^31 and 2^32 bytes."""
    stride = stride_gib << 30
    buffer = torch.from_numpy(np.zeros(4 * stride + 4096, dtype=np.uint8))  # never touched: free
    pool = PagedPool(layout, buffer.as_strided((5, 4096), (stride, 1)), page_size=4)
    slots = torch.tensor([19, 4, 11, 13])
    values = random_values(layout, 4, seed=5)
    layout.write(pool, slots, values)
    assert layout.gather(pool, slots).equal(layout.dequantise(layout.quantise(values)))
    page, offset = 4, 3
    first = buffer[page * stride + offset * layout.plane_widths[0] :][: layout.plane_widths[0]]
    assert first.equal(layout.quantise(values)[0, : layout.plane_widths[0]])
    ranged = layout.gather_range(pool, torch.tensor([0, 4], dtype=torch.int32), 6, 2)
    assert ranged[1].equal(layout.gather(pool, slots)[0])


def test_a_contiguous_pool_past_two_gib() -> None:
    layout = PlainLayout(torch.float32, 64)
    num_pages = (2 << 30) // layout.page_bytes(16) + 3
    storage = torch.from_numpy(np.zeros((num_pages, 4096), dtype=np.uint8))
    pool = PagedPool(layout, storage, page_size=16)
    last = torch.tensor([pool.num_slots - 1])
    layout.write(pool, last, torch.full((1, 64), 7.0))
    assert layout.gather(pool, last.int()).eq(7.0).all()
    assert pool.typed()[pool.num_slots - 1].eq(7.0).all()


def test_a_new_pool_costs_no_memory_until_it_is_written() -> None:
    """The memory of the process grows by far less than the pool's 2 GiB."""
    layout = PlainLayout(torch.bfloat16, 64)
    before = psutil.Process().memory_info().rss
    pool = layout.allocate(2**20, 16)  # 2 GiB
    layout.write(pool, torch.tensor([pool.num_slots - 1]), torch.ones(1, 64))
    grown = psutil.Process().memory_info().rss - before
    assert layout.gather(pool, torch.tensor([pool.num_slots - 1, 0])).sum() == 64
    assert grown < 2**29


def test_typed_view_shares_the_bytes() -> None:
    layout = PlainLayout(torch.bfloat16, 6)
    pool = layout.allocate(3, 4)
    pool.typed()[5] = 2.0
    assert layout.gather(pool, torch.tensor([5])).tolist() == [[2.0] * 6]
    assert pool.typed_pages()[1, 1].tolist() == [2.0] * 6
    gapped = layout.allocate(3, 4, page_stride_bytes=layout.page_bytes(4) + 2)
    gapped.typed_pages()[2, 3] = 4.0
    assert layout.gather(gapped, torch.tensor([11])).tolist() == [[4.0] * 6]
    with pytest.raises(LayoutError, match="no typed view"):
        gapped.typed()
    with pytest.raises(LayoutError, match="no typed view"):
        Fp8LatentLayout(8, 4).allocate(2, 4).typed_pages()


def test_reading_as_another_dtype_keeps_the_bytes() -> None:
    layout = PlainLayout(torch.float32, 4)
    pool = layout.allocate(2, 2)
    layout.write(pool, torch.tensor([3]), torch.full((1, 4), 0.1))
    wide = layout.computing_in(torch.float64)
    assert wide.gather(pool, torch.tensor([3])).dtype == torch.float64
    assert wide.gather_range(pool, torch.tensor([1]), 1, 1).tolist() == [
        [float(np.float32(0.1))] * 4
    ]
