"""Tile sizes of matrix products, by shape: measured on an H200 where a shape was measured.

In:  rows of a product, its widths, whether weights are FP8, how many experts share the rows.
Out: a Tile, or one for each product of a mixture. `fixed_*`: a tile that the number of rows has no
     part in, so that a row's bits hang on the row alone, whatever runs beside it.
Not here: launching (linear.py, moe.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gnomon.attention.providers.triton.language import padded

SM_COUNT = 132  # of an H200; only a choice hangs on it
NARROW = 4096  # columns of a weight that wide tiles suit
SHORT = 2048  # columns of x that are not split
WIDEST_GROUP = 1 << 20  # all row blocks before the next column tile


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

    ``is_split``: gate and up are columns of one product, activated by a launch of its own.
    """

    fused: Tile
    down: Tile
    is_split: bool = False


def depth_of(is_fp8: bool, itemsize: int, width: int) -> int:
    """Columns of x in one step: one scale group of FP8, 128 bytes of others."""
    if is_fp8:
        return 128
    return min(128 // itemsize, padded(width, 16))


def linear_tile(num_rows: int, num_columns: int, width: int) -> Tile:
    """For x [num_rows, width] and an FP8 weight [num_columns, width]."""
    if num_rows <= 128:
        return _streaming(num_rows, num_columns, width)
    tile = Tile(128, 128, 128, warps=8, stages=4, group=16)
    if num_columns < NARROW and _programs(tile, num_rows, num_columns) >= 4 * SM_COUNT:
        return tile
    # Three of these share a processor: one multiplies while the others scale their sums.
    tile = Tile(64, 128, 128, warps=4, stages=3, group=16)
    splits = _splits(_programs(tile, num_rows, num_columns), width, SM_COUNT)
    return replace(tile, splits=splits)


def fixed_linear_tile(num_columns: int, width: int) -> Tile:
    """One tile for every number of rows."""
    splits = _splits(-(-num_columns // 128), width, SM_COUNT)
    return Tile(64, 128, 128, splits=splits, warps=4, stages=4)


def _streaming(num_rows: int, num_columns: int, width: int) -> Tile:
    """Few rows: weights pass once, so all processors have to be busy reading them."""
    rows = min(padded(num_rows, 16), 64)  # wider tiles would leave a processor one program
    if num_columns >= 128 * SM_COUNT:
        return Tile(rows, 128, 128, warps=8 if rows <= 32 else 4, stages=4)
    if width <= SHORT:  # a launch that adds splits would take longer than it saves
        return Tile(rows, 64, 128, warps=4, stages=5)
    # Splits' sums are written and read again: with more rows fewer of them pay.
    return split_tile(rows, num_columns, width, 128, SM_COUNT * (2 if rows <= 32 else 1))


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


def moe_tiles(num_pairs: int, down: Tensor, is_fp8: bool) -> MoeTiles:
    """For pairs of rows and experts; ``down`` [E, D, I]."""
    num_experts, _, width = down.shape
    named = max(1, min(num_experts, num_pairs))
    rows = min(128, padded(-(-num_pairs // named), 16))
    programs = named * -(-width // 128)
    # Few experts of few columns: finer tiles keep processors busy, at the price of one more launch.
    is_split = is_fp8 and rows == 16 and programs < SM_COUNT * 3 // 4
    return _moe_tiles(rows, down, is_fp8, is_split)


def fixed_moe_tiles(down: Tensor, is_fp8: bool) -> MoeTiles:
    """One pair of tiles for every number of rows."""
    return _moe_tiles(64, down, is_fp8, is_split=False)


def _moe_tiles(rows: int, down: Tensor, is_fp8: bool, is_split: bool) -> MoeTiles:
    _, hidden_size, width = down.shape
    itemsize = down.element_size()
    in_depth = depth_of(is_fp8, itemsize, hidden_size)
    out_depth = depth_of(is_fp8, itemsize, width)
    group = 16 if rows >= 64 else WIDEST_GROUP
    warps = 4 if rows <= 32 else 8
    stages = 5 if 32 <= rows <= 64 else 3
    if is_split:
        first = Tile(rows, 32, in_depth, warps=4, stages=5)
    elif is_fp8:
        first = Tile(rows, 128, in_depth, warps=warps, stages=stages, group=group)
    else:
        columns = min(128 if itemsize == 2 else 32, padded(width, 16))
        first = Tile(rows, columns, in_depth, warps=warps, stages=3, group=group)
    columns = min(128 if itemsize <= 2 else 64, padded(hidden_size, 16))
    return MoeTiles(
        first, Tile(rows, columns, out_depth, warps=warps, stages=4, group=group), is_split
    )
