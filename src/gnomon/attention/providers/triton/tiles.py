"""Tile sizes of matrix products, by shape: measured on an H200 where a shape was measured.

In:  rows of a product, its widths, whether weights are FP8, how many experts share the rows.
Out: a Tile, or one for each product of a mixture. `fixed_*`: tiles whose products of a row have the
     same bits whatever runs beside it: parts of K follow from the weight alone; where the device is
     known to give equal bits in tiles of any size (`has_equal_tiles`) the rest is as usual, and
     elsewhere the number of rows has no part in it.
Not here: launching (linear.py, moe.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from gnomon.attention.providers.triton.attention_tiles import has_wgmma
from gnomon.attention.providers.triton.language import has_native_fp8, padded

SM_COUNT = 132  # of an H200; only a choice hangs on it
NARROW = 4096  # columns of a weight that wide tiles suit
SHORT = 2048  # columns of x that are not split
WIDEST_GROUP = 1 << 20  # all row blocks before the next column tile
FIXED_ROWS = 64
HALF_BLOCKS = 45  # rows of an expert up to which blocks of 64 are multiplied by halves


@dataclass(frozen=True, slots=True)
class Tile:
    """rows × columns of one program, K per step, splits of K, launch parameters.

    ``group``: row blocks that pass over all column tiles together, for the L2 cache. Tiles of fewer
    rows than ``swap_below`` have the weight as the tall operand.
    """

    rows: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    group: int = WIDEST_GROUP
    swap_below: int = 64

    @property
    def is_swapped(self) -> bool:
        """Whether the weight is the tall operand."""
        return self.rows < self.swap_below


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """Tiles of the two grouped products; ``down`` has as many rows as ``fused``, or a part of them.

    ``fused.rows`` is what an expert's rows are filled up to.

    ``is_split``: gate and up are columns of one product, activated by a launch of its own.
    """

    fused: Tile
    down: Tile
    is_split: bool = False


class Kind(Enum):
    """Devices that tiles differ by."""

    HOPPER = "sm_90, the one that is measured; 227 KiB of a block's memory"
    NEWER = "multiplies e4m3; a block may have no more than 99 KiB"
    OLDER = "e4m3 is decoded to fp16, which takes registers"


def kind_of(device: torch.device) -> Kind:
    """Of a CPU or no device Hopper's, so that tests meet its tiles."""
    if device.type != "cuda" or has_wgmma(device):
        return Kind.HOPPER
    return Kind.NEWER if has_native_fp8(device) else Kind.OLDER


def fitted(tile: Tile, kind: Kind, most_rows: int = 64) -> Tile:
    """A tile of at most 128 columns that neither asks for too much memory there nor spills."""
    if kind is Kind.HOPPER:
        return tile
    rows = min(tile.rows, most_rows)
    warps = 8 if rows > 16 and tile.columns >= 128 else tile.warps
    stages = min(tile.stages, 3) if tile.columns >= 128 else tile.stages
    return replace(tile, rows=rows, warps=warps, stages=stages)


def depth_of(is_fp8: bool, itemsize: int, width: int) -> int:
    """Columns of x in one step: one scale group of FP8, 128 bytes of others."""
    if is_fp8:
        return 128
    return min(128 // itemsize, padded(width, 16))


def has_equal_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a dot has the same bits in tiles of any size, either operand the tall one.

    So it is on sm_90 for FP8 and halves (tests/gpu/test_deterministic.py): WGMMA sums over K in one
    order. Not known of other devices, nor of fp32, which is multiplied without tensor cores.
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper and dtype.itemsize <= 2


def linear_tile(num_rows: int, num_columns: int, width: int, kind: Kind = Kind.HOPPER) -> Tile:
    """For x [num_rows, width] and an FP8 weight [num_columns, width]."""
    return fitted(_linear_tile(num_rows, num_columns, width), kind)


def _linear_tile(num_rows: int, num_columns: int, width: int) -> Tile:
    if num_rows <= 128:
        return _streaming(num_rows, num_columns, width)
    tile = Tile(128, 128, 128, warps=8, stages=4, group=16)
    if num_columns < NARROW and _programs(tile, num_rows, num_columns) >= 4 * SM_COUNT:
        return tile
    # Three of these share a processor: one multiplies while the others scale their sums.
    tile = Tile(64, 128, 128, warps=4, stages=3, group=16)
    splits = _splits(_programs(tile, num_rows, num_columns), width, SM_COUNT)
    return replace(tile, splits=splits)


def fixed_linear_tile(
    num_rows: int, num_columns: int, width: int, are_equal: bool, kind: Kind = Kind.HOPPER
) -> Tile:
    """For every number of rows the same parts of K; the same tile unless tiles ``are_equal``."""
    splits = 1 if width <= SHORT else _splits(-(-num_columns // 128), width, SM_COUNT)
    if are_equal:
        return replace(linear_tile(num_rows, num_columns, width, kind), splits=splits)
    return fitted(Tile(FIXED_ROWS, 128, 128, splits=splits, warps=4, stages=4), kind)


def _streaming(num_rows: int, num_columns: int, width: int) -> Tile:
    """Few rows: weights pass once, so all processors have to be busy reading them."""
    rows = min(padded(num_rows, 16), 64)  # wider tiles would leave a processor one program
    if num_columns >= 128 * SM_COUNT:
        if width <= SHORT:
            return Tile(rows, 128, 128, warps=8 if rows <= 32 else 4, stages=4)
        if 32 < num_rows <= 64:
            return Tile(rows, 64, 128, warps=4, stages=5)
        return Tile(rows, 128, 128, warps=4, stages=3 if rows <= 32 else 4)
    if width <= SHORT:  # a launch that adds splits would take longer than it saves
        return Tile(rows, 64, 128, warps=4, stages=5)
    if num_columns >= NARROW and 8 < num_rows <= 64:  # two programs a processor, in one wave
        splits = max(1, min(2 * SM_COUNT // -(-num_columns // 64), width // 512))
        return Tile(rows, 64, 128, splits=splits, warps=4, stages=5)
    # Splits' sums are written and read again: with more rows or fewer columns fewer of them pay.
    is_few = num_rows <= 8 and num_columns >= NARROW
    return split_tile(rows, num_columns, width, 128, SM_COUNT * (2 if is_few else 1))


def split_tile(rows: int, num_columns: int, width: int, columns: int, programs: int) -> Tile:
    """K in parts that bring the programs near ``programs``."""
    splits = _splits(-(-num_columns // columns), width, programs)
    return Tile(rows, columns, 128, splits=splits, warps=4, stages=5 if columns <= 64 else 4)


def _splits(num_tiles: int, width: int, programs: int) -> int:
    """Parts of K, none shorter than four steps, that bring the programs near ``programs``."""
    wanted = (programs + num_tiles // 2) // num_tiles
    return max(1, min(wanted, 16, width // 512))


def _programs(tile: Tile, num_rows: int, num_columns: int) -> int:
    return -(-num_rows // tile.rows) * -(-num_columns // tile.columns)


def moe_tiles(num_pairs: int, down: Tensor, is_fp8: bool, kind: Kind = Kind.HOPPER) -> MoeTiles:
    """For pairs of rows and experts; ``down`` [E, D, I]."""
    mean = _mean_rows(num_pairs, down)
    rows = _block_rows(mean)
    programs = min(down.shape[0], max(1, num_pairs)) * -(-down.shape[2] // 128)
    # Few experts of few columns: finer tiles keep processors busy, at the price of one more launch.
    is_split = is_fp8 and rows == 16 and programs < SM_COUNT * 3 // 4
    found = _apart(down, is_fp8) if is_split else _together(mean, down, is_fp8)
    return _fitted_pair(found, kind, is_fp8)


def fixed_moe_tiles(
    num_pairs: int, down: Tensor, is_fp8: bool, are_equal: bool, kind: Kind = Kind.HOPPER
) -> MoeTiles:
    """One pair of tiles for every number of pairs, unless tiles ``are_equal``."""
    if are_equal:  # on Hopper
        return _together(_mean_rows(num_pairs, down), down, is_fp8)
    tiles = _together(FIXED_ROWS, down, is_fp8)
    fused = replace(tiles.fused, group=16)
    second = replace(tiles.down, rows=FIXED_ROWS, warps=8, stages=4, group=16)
    return _fitted_pair(MoeTiles(fused, second), kind, is_fp8)


def _fitted_pair(tiles: MoeTiles, kind: Kind, is_fp8: bool) -> MoeTiles:
    """Two sums of 64 rows and decoded codes are more than the registers of an older device."""
    if kind is Kind.HOPPER:
        return tiles
    fused = fitted(tiles.fused, kind, 32 if is_fp8 and kind is Kind.OLDER else 64)
    return replace(tiles, fused=fused, down=fitted(tiles.down, kind, fused.rows))


def _mean_rows(num_pairs: int, down: Tensor) -> int:
    """Of an expert, rounded up."""
    return -(-num_pairs // max(1, min(down.shape[0], num_pairs)))


def _block_rows(mean: int) -> int:
    """Rows of a tile that hold the mean expert's."""
    return min(128, padded(mean, 16))


def _apart(down: Tensor, is_fp8: bool) -> MoeTiles:
    """Few rows; gate and up are activated by a launch of its own."""
    tiles = _together(16, down, is_fp8)
    first = Tile(16, 32, tiles.fused.depth, warps=4, stages=5)
    return MoeTiles(first, tiles.down, is_split=True)


def _together(mean: int, down: Tensor, is_fp8: bool) -> MoeTiles:
    """Gate and up activated by their product; experts have ``mean`` rows."""
    rows = _block_rows(mean)
    _, hidden_size, width = down.shape
    itemsize = down.element_size()
    in_depth = depth_of(is_fp8, itemsize, hidden_size)
    out_depth = depth_of(is_fp8, itemsize, width)
    group = 16 if rows > 64 or (rows == 64 and not is_fp8) else WIDEST_GROUP
    warps = 4 if rows <= 32 else 8
    if is_fp8:
        stages = 5 if 32 <= rows <= 64 else 3
        first = Tile(rows, 128, in_depth, warps=warps, stages=stages, group=group)
    else:
        columns = min(128 if itemsize == 2 else 32, padded(width, 16))
        first = Tile(rows, columns, in_depth, warps=warps, stages=3, group=group)
    columns = min(128 if itemsize <= 2 else 64, padded(hidden_size, 16))
    second = Tile(rows, columns, out_depth, warps=warps, stages=4, group=group)
    if is_fp8 and 16 < mean <= HALF_BLOCKS:  # most have no more than 32, and more programs run
        second = replace(second, rows=32, warps=4, stages=5)
    elif is_fp8 and rows == 64:
        second = replace(second, warps=4)
    return MoeTiles(first, second)
