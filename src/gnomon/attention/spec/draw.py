"""Random material for the specs' cases: tensors, row axes, pools with pages in shuffled order.

In:  a torch.Generator, sizes. Out: values on the CPU; same generator state, same values.
Not here: what is special about a case (the specs).
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from gnomon.attention.axes import RowAxis, spans_of
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.values import RopeRows, RopeTable


def normal(generator: Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Standard normal numbers, drawn in fp64 and rounded to ``dtype``."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def integers(generator: Generator, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    """Uniform int64 in low .. high − 1."""
    return torch.randint(low, high, shape, generator=generator)


def row_axis(positions: list[int]) -> RowAxis:
    """An axis of one request per row; position −1 makes a padding row."""
    position = torch.tensor(positions, dtype=torch.int32)
    is_live = position >= 0
    request = torch.where(is_live, torch.arange(len(positions), dtype=torch.int32), -1)
    place = position.clamp_min(0)
    spans = spans_of(request.numpy().astype("int64"), place.numpy().astype("int64"))
    return RowAxis(
        request.to(torch.int32),
        place,
        (position + 1).clamp_min(0),
        int(is_live.sum()),
        spans,
        "spec",
    )


def rope_rows(positions: list[int], dim: int, is_interleaved: bool) -> RopeRows:
    """Rotations by angle position · 10000^(−2i / dim), as oracle_math.md §1.3."""
    frequency = 10000.0 ** (-2.0 * torch.arange(dim // 2, dtype=torch.float64) / dim)
    angle = torch.arange(max([1, *(p + 1 for p in positions)]))[:, None] * frequency
    table = RopeTable(angle.cos().float(), angle.sin().float())
    return table.at(row_axis(positions), is_interleaved)


def plain_pool(
    generator: Generator, num_pages: int, page_size: int, dim: int, dtype: torch.dtype
) -> PagedPool:
    """A pool of random entries (the null page too: nothing may depend on it)."""
    pool = PlainLayout(dtype, dim).allocate(num_pages, page_size)
    pool.typed().copy_(normal(generator, (pool.num_slots, dim), dtype))
    return pool


def page_lists(
    generator: Generator, lengths: list[int], page_size: int, width: int | None = None
) -> tuple[Tensor, int]:
    """Pages [len(lengths), width] int32 in shuffled order, 0 beyond a row's own; and pool pages."""
    needs = [math.ceil(length / page_size) for length in lengths]
    columns = max([1, *needs]) if width is None else width
    shuffled = (torch.randperm(sum(needs), generator=generator) + 1).to(torch.int32)
    pages = torch.zeros(len(lengths), columns, dtype=torch.int32)
    start = 0
    for row, need in enumerate(needs):
        pages[row, :need] = shuffled[start : start + need]
        start += need
    return pages, sum(needs) + 1


def slot_lists(
    generator: Generator, counts: list[int], width: int, num_slots: int
) -> tuple[Tensor, Tensor]:
    """Distinct random slots [R, width] int64 (−1 after the count) and counts [R] int32."""
    slots = torch.full((len(counts), width), -1, dtype=torch.int64)
    for row, count in enumerate(counts):
        slots[row, :count] = torch.randperm(num_slots, generator=generator)[:count]
    return slots, torch.tensor(counts, dtype=torch.int32)


def expert_choices(generator: Generator, num_rows: int, num_experts: int, k: int) -> Tensor:
    """Distinct experts of every row, int64 [num_rows, k]."""
    return torch.rand(num_rows, num_experts, generator=generator).argsort(dim=1)[:, :k]
