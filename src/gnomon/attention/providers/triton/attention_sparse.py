"""sparse_mla of the triton provider: whole lists a program where rows abound, else splits.

In:  q_latent [R, H, D_c], q_rope [R, H, D_r] (any strides; D_r may be 0), a pool of a plain or an
     fp8_ds_mla layout, slots [R, W] (int64 or int32, −1 behind), count [R] int32, scale > 0;
     ``out`` (out, lse) to write into.
Out: (out [R, H, D_c] in the query's dtype, lse [R, H] fp32 natural).
Half queries meet plain entries in their own dtype and packed ones in fp16 (attention_lists.py says
where that is exact), fp32 queries everything in fp32; weights are rounded to that dtype before they
meet the values; sums are fp32. Splits of lists are stored normalised: means of packed latents,
fp16 when they are summed, fit fp16 again; those of plain pools are fp32. A head block has 16, 32 or
64 heads, whatever R.
Maths: oracle_math.md §1.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.providers.triton.attention_lists import attend_lists, combine_splits
from gnomon.attention.providers.triton.attention_tiles import (
    FIXED_SPLIT_KEYS,
    ListTile,
    can_launch_early,
    choose_splits,
    choose_tile,
    count_processors,
    has_wgmma,
)
from gnomon.attention.providers.triton.language import has_native_fp8, padded
from gnomon.errors import UnsupportedError

FIXED_SCRATCH_BYTES = 256 << 20  # parts of the rows that sparse_mla_fixed runs at once

Result = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Splits:
    """How many programs share a row's list; ``keys``: a constant share of each, 0 for even ones."""

    number: int
    keys: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether lists are not cut; one cut that may be one of many is stored as those are."""
        return self.number == 1 and self.keys == 0


def sparse_mla(
    q_latent: Tensor,
    q_rope: Tensor,
    pool: PagedPool,
    slots: Tensor,
    count: Tensor,
    scale: float,
    out: Result | None = None,
) -> Result:
    """Row r attends the first count[r] of its slots; as many splits as keep the device busy."""
    is_packed = not isinstance(pool.layout, PlainLayout)
    tile, splits = form_of(q_latent, is_packed, q_latent.shape[0], slots.shape[1])
    call = ListCall(q_latent, q_rope, pool, slots, count, scale)
    return call.run(tile, splits, out)


def sparse_mla_fixed(
    q_latent: Tensor,
    q_rope: Tensor,
    pool: PagedPool,
    slots: Tensor,
    count: Tensor,
    scale: float,
    out: Result | None = None,
) -> Result:
    """As sparse_mla; a row's bits hang on its own data alone, not on R, W or the other rows.

    Every list is cut after each 512 keys and the cuts are added in order, whatever else runs.
    """
    num_rows, num_heads, width = q_latent.shape
    tile = tile_of(q_latent, pool)
    number = max(1, -(-slots.shape[1] // FIXED_SPLIT_KEYS))
    splits = Splits(number, FIXED_SPLIT_KEYS)
    row_bytes = number * num_heads * (width * split_dtype(q_latent, pool).itemsize + 4)
    block = max(1, FIXED_SCRATCH_BYTES // row_bytes)
    if num_rows <= block:
        call = ListCall(q_latent, q_rope, pool, slots, count, scale)
        return call.run(tile, splits, out)
    results = out if out is not None else new_result(q_latent)
    for start in range(0, num_rows, block):
        rows = slice(start, start + block)
        call = ListCall(q_latent[rows], q_rope[rows], pool, slots[rows], count[rows], scale)
        call.run(tile, splits, (results[0][rows], results[1][rows]))
    return results


@dataclass(frozen=True, slots=True)
class ListCall:
    """The arguments of one call, ready to be launched with any tile and any splits."""

    q_latent: Tensor
    q_rope: Tensor
    pool: PagedPool
    slots: Tensor
    count: Tensor
    scale: float

    def run(self, tile: ListTile, splits: Splits, out: Result | None = None) -> Result:
        """Launch; no launch for no rows."""
        results = out if out is not None else new_result(self.q_latent)
        if self.q_latent.numel() == 0:
            return results
        if not (results[0].is_contiguous() and results[1].is_contiguous()):
            inner = self.run(tile, splits)
            return results[0].copy_(inner[0]), results[1].copy_(inner[1])
        if splits.is_whole:
            self._attend(tile, splits, results)
            return results
        num_rows, num_heads, width = self.q_latent.shape
        shape = (splits.number, num_rows, num_heads)
        dtype = split_dtype(self.q_latent, self.pool)
        parts = self.q_latent.new_empty((*shape, width), dtype=dtype)
        levels = self.q_latent.new_empty(shape, dtype=torch.float32)
        self._attend(tile, splits, (parts, levels))
        is_early = can_launch_early(self.q_latent.device)
        combine_splits[(num_rows * num_heads,)](
            parts, levels, self.count, *results, num_rows,
            H=num_heads, DC=width, DCP=padded(width, 16), BN=tile.keys,
            NUM_SPLITS=splits.number, SPLIT_KEYS=splits.keys, num_warps=4,
            IS_EARLY=is_early, **({"launch_pdl": True} if is_early else {}),
        )  # fmt: skip
        return results

    def _attend(self, tile: ListTile, splits: Splits, results: Result) -> None:
        num_rows, num_heads, width = self.q_latent.shape
        rope_width, layout = self.q_rope.shape[-1], self.pool.layout
        groups, entry = entry_format(layout)
        entries, unit = stored_entries(self.pool)
        attend_lists[(num_rows * -(-num_heads // tile.heads), splits.number)](
            self.q_latent, self.q_rope, entries, self.slots, self.count, *results,
            self.scale * math.log2(math.e), self.pool.page_stride_bytes // unit, splits.number,
            *self.q_latent.stride(), *self.q_rope.stride(), *self.slots.stride(),
            H=num_heads, DC=width, DR=rope_width,
            DCP=padded(width, 16), DRP=padded(rope_width, 16),
            GROUPS=groups, WIDTH=entry,
            PAGE=0 if self.pool.is_contiguous else self.pool.page_size,
            NATIVE=has_native_fp8(self.q_latent.device),
            BH=tile.heads, BN=tile.keys, STAGES=tile.num_stages,
            IS_SPLIT=not splits.is_whole, SPLIT_KEYS=splits.keys,
            READS_AHEAD=tile.reads_ahead, PARTS=tile.parts,
            IS_EARLY=not splits.is_whole and can_launch_early(self.q_latent.device),
            num_warps=tile.num_warps, maxnreg=tile.max_registers,
        )  # fmt: skip


def form_of(
    q_latent: Tensor, is_packed: bool, num_rows: int, list_width: int
) -> tuple[ListTile, Splits]:
    """What sparse_mla runs with for so many rows like those of q_latent."""
    _, num_heads, width = q_latent.shape
    on_hopper = has_wgmma(q_latent.device)
    tile = choose_tile(num_heads, width, q_latent.dtype, is_packed, num_rows, on_hopper)
    programs = num_rows * -(-num_heads // tile.heads)
    processors = count_processors(q_latent.device)
    return tile, Splits(choose_splits(max(programs, 1), list_width, tile, processors))


def numbers_of_rows(q_latent: Tensor, list_width: int, most_rows: int) -> list[int]:
    """Ascending: the fewest and the most rows that run with each form of sparse_mla.

    Over either kind of pool: packed latents are unpacked first where rows are many.
    """
    fewest: dict[tuple[ListTile, Splits, bool], int] = {}
    most: dict[tuple[ListTile, Splits, bool], int] = {}
    for is_packed in (False, True):
        for num_rows in range(1, most_rows + 1):
            form = (*form_of(q_latent, is_packed, num_rows, list_width), is_packed)
            fewest.setdefault(form, num_rows)
            most[form] = num_rows
    return sorted({*fewest.values(), *most.values()})


def tile_of(q_latent: Tensor, pool: PagedPool) -> ListTile:
    """The tile of a call in which the number of rows has no say."""
    is_packed = not isinstance(pool.layout, PlainLayout)
    _, num_heads, width = q_latent.shape
    on_hopper = has_wgmma(q_latent.device)
    return choose_tile(num_heads, width, q_latent.dtype, is_packed, None, on_hopper)


def split_dtype(q_latent: Tensor, pool: PagedPool) -> torch.dtype:
    """What a split's result is stored in."""
    is_packed = not isinstance(pool.layout, PlainLayout)
    return torch.float16 if is_packed and q_latent.dtype != torch.float32 else torch.float32


def new_result(q_latent: Tensor) -> Result:
    """Uninitialised (out, lse); every row of them is written."""
    return (
        q_latent.new_empty(q_latent.shape),
        q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32),
    )


def entry_format(layout: KVLayout) -> tuple[int, int]:
    """(scales of an entry, its width in stored numbers); UnsupportedError for other layouts."""
    if isinstance(layout, PlainLayout):
        return 0, layout.num_columns
    if isinstance(layout, Fp8LatentLayout):
        return layout.num_groups, layout.bytes_per_token
    raise UnsupportedError(
        f"the triton provider's sparse_mla reads plain and fp8_ds_mla layouts, not {layout.id}; "
        "use one of them, or provider torch"
    )


def stored_entries(pool: PagedPool) -> tuple[Tensor, int]:
    """(numbers of a plain pool or bytes of a packed one, bytes of one of them)."""
    if isinstance(pool.layout, PlainLayout):
        pages = pool.typed_pages()
        return pages, pages.element_size()
    return pool.storage, 1
