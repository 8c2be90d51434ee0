"""Which tiles and how many splits sparse MLA runs with: pure functions of what the host knows.

In:  head counts, widths, dtypes, numbers of rows, widths of lists, the device's processors.
Out: `ListTile`, numbers of splits. Nothing is read from a device: a captured graph is valid
     whatever the counts turn out to be.
Figures behind the choices: bench/tune_attention.py on an H200, topk 2048.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gnomon.attention.providers.triton.language import padded

SPLIT_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # few, as each compiles a combine of its own
FIXED_SPLIT_KEYS = 512
WAVE_COST = 2.0  # start and end of a program, in turns of its loop over key blocks
SPLIT_COST = 0.02  # what another split adds to the combine, in the same unit: hardly anything
LARGEST_ACCUMULATOR = 64 * 512  # numbers of fp32 in the registers of 8 warps


@dataclass(frozen=True, slots=True)
class ListTile:
    """Heads and keys of a block, how it is compiled, and how many fit on one processor.

    ``reads_ahead``: the next turn's slots are read a turn before their entries are asked for.
    ``max_registers``: of a thread, so that more programs fit; None leaves it to the compiler.
    ``parts``: blocks of columns that plain latents are read in (attention_lists.py).
    """

    heads: int
    keys: int
    num_warps: int
    num_stages: int
    per_processor: int = 1
    reads_ahead: bool = False
    max_registers: int | None = None
    parts: int = 1


# By whether the pool is packed.
FEW_HEADS = {
    False: ListTile(16, 64, 4, 2, per_processor=2, reads_ahead=True, parts=4),
    True: ListTile(16, 32, 4, 2, per_processor=2, reads_ahead=True),
}
MANY_HEADS = {
    False: ListTile(64, 64, 8, 2, reads_ahead=True),
    True: ListTile(64, 64, 8, 3, reads_ahead=True),
}
FEW_ROWS = 8  # lists are cut into single turns then, and a program's start is what counts
FEW_HEADS_FEW_ROWS = ListTile(16, 64, 8, 3, reads_ahead=True)  # packed
MANY_HEADS_FEW_ROWS = ListTile(64, 64, 8, 2)  # packed
DECODE_ROWS = 256
FEW_HEADS_DECODE = ListTile(16, 32, 4, 3, per_processor=2, reads_ahead=True)  # plain


def choose_tile(
    num_heads: int,
    width: int,
    dtype: torch.dtype,
    is_packed: bool,
    num_rows: int | None = None,
    is_hopper: bool = True,
) -> ListTile:
    """The tile for ``num_heads`` heads of ``width`` latents; 16 heads never pay for more.

    Over 16 packed ones take a block of 64 all the same: blocks of 32 spill, and tensor time is not
    what a decode step waits for. ``num_rows`` None: the same tile however many rows there are.
    Not Hopper (sm_80, 89, 120): a tile fits 99 KiB.
    """
    if dtype == torch.float32:
        return ListTile(16, 16, 8, 1)  # IEEE products do without tensor cores
    if not is_hopper:
        return ListTile(16, 32, 8, 1)
    has_few_rows = is_packed and num_rows is not None and num_rows <= FEW_ROWS
    if num_heads <= 16:
        tile = FEW_HEADS_FEW_ROWS if has_few_rows else FEW_HEADS[is_packed]
        if not is_packed and num_rows is not None and num_rows <= DECODE_ROWS:
            tile = FEW_HEADS_DECODE
    elif num_heads <= 32 and not is_packed:
        tile = ListTile(32, 64, 8, 2, reads_ahead=True)
    else:
        tile = MANY_HEADS_FEW_ROWS if has_few_rows else MANY_HEADS[is_packed]
    if width % (16 * tile.parts) or width != padded(width):
        tile = replace(tile, parts=1)
    while tile.heads > 16 and tile.heads * padded(width, 16) > LARGEST_ACCUMULATOR:
        tile = replace(tile, heads=tile.heads // 2)
    return tile


def choose_splits(num_programs: int, width: int, tile: ListTile, num_processors: int) -> int:
    """Splits of lists of ``width`` that take the least time for ``num_programs`` unsplit programs.

    Time is waves of programs times (turns of the longest split + WAVE_COST), plus the combine's.
    """
    turns = -(-width // tile.keys)
    places = num_processors * tile.per_processor

    def cost(splits: int) -> float:
        waves = -(-num_programs * splits // places)
        return waves * (-(-turns // splits) + WAVE_COST) + (SPLIT_COST * splits + 1) * (splits > 1)

    return min((s for s in SPLIT_CHOICES if s <= max(turns, 1)), key=cost)


def count_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for a CPU, where splits gain nothing."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_wgmma(device: torch.device) -> bool:
    """Whether tiles may be Hopper's; on a CPU they are, so that tests meet them."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def can_launch_early(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one that it waits for has ended: sm_90, newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
