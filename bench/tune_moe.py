"""Measure tiles of matrix products on a GPU, per shape: GB/s, TFLOP/s and the fastest tile.

In:  a CUDA device with Triton. Options: --part experts|linears|all, --seconds (a budget; cells that
     do not fit are left out and said so), --json FILE for all figures.
Out: one line per cell with the fastest tile, the tile that tiles.py takes, and both times; weights
     rotate through more bytes than the L2 cache holds, as in a model.
Kernels are compiled first, by a process per core, into Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from tune_moe_cells import (
    EXPERTS,
    LINEARS,
    Cell,
    ExpertRun,
    LinearRun,
    expert_candidates,
    expert_cells,
    linear_candidates,
    linear_cells,
    weight,
)

from gnomon.attention.providers.triton import tiles
from gnomon.attention.providers.triton.linear_quantise import quantise_rows
from gnomon.attention.providers.triton.tiles import Tile

DECODE_ROWS = (1, 16, 64, 128)
PREFILL_ROWS = (8192,)


def kinds(part: str, rows: tuple[int, ...]) -> list[tuple[str, Tile]]:
    """Every kernel and tile that the cells want."""
    found: list[tuple[str, Tile]] = []
    for num_rows in rows:
        for columns, width in LINEARS.values() if part != "experts" else ():
            found += [("linear", t) for t in linear_candidates(num_rows, columns, width)]
        for shape in EXPERTS.values() if part != "linears" else ():
            down = torch.empty(*shape, dtype=torch.uint8, device="meta")
            taken = tiles.moe_tiles(9 * num_rows, down, is_fp8=True)
            found += [("first", t) for t in expert_candidates(num_rows, taken.fused)]
            found += [("second", t) for t in expert_candidates(num_rows, taken.down)]
    return list(dict.fromkeys(found))


def compile_share(wanted: list[tuple[str, Tile]]) -> None:
    """Run kernels once over small tensors, whose sizes are multiples of 16 as the real ones are."""
    x = quantise_rows(torch.randn(16, 512, device="cuda"), False)
    small = LinearRun(x, [weight(512, 512)])
    experts = ExpertRun(16, weight(16, 512, 512), weight(16, 512, 256))
    calls = {"linear": small, "first": experts.first, "second": experts.second}
    for kind, tile in wanted:
        try:
            calls[kind](tile)
        except Exception as error:
            print(f"not compiled: {kind} {shown(tile)}: {str(error)[:80]}", file=sys.stderr)


def timed(cell: Cell, tile: Tile) -> float:
    """Microseconds of one call, over calls in a row that last some milliseconds."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 3 if cell.flops > 1e11 else 20
    torch.cuda._sleep(5_000_000)  # the host launches meanwhile
    start.record()
    for _ in range(count):
        cell.run(tile)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1000 / count


def measure(cell: Cell) -> list[tuple[float, Tile]]:
    """Sorted times of the candidates that run."""
    found: list[tuple[float, Tile]] = []
    for tile in cell.candidates:
        try:
            cell.run(tile)
            found.append((timed(cell, tile), tile))
        except Exception as error:
            print(f"{cell.name} {shown(tile)}: {str(error)[:60]}")
    return sorted(found, key=lambda pair: pair[0])


def shown(tile: Tile) -> str:
    """Short."""
    return (
        f"{tile.rows}x{tile.columns} s{tile.splits} w{tile.warps} st{tile.stages} "
        f"g{tile.group if tile.group < 1000 else '-'}"
    )


def reported(cell: Cell) -> dict[str, object]:
    """Measure a cell and print its line."""
    found = measure(cell)
    if not found:
        return {"cell": cell.name}
    best, tile = found[0]
    now = {tile: us for us, tile in found}.get(cell.taken, float("nan"))
    print(
        f"{cell.name:24} best {best:8.1f} us {cell.num_bytes / best / 1e3:6.0f} GB/s "
        f"{cell.flops / best / 1e6:6.0f} TF {shown(tile):22} "
        f"| now {now:8.1f} {shown(cell.taken)}",
        flush=True,
    )
    times = [(us, shown(t)) for us, t in found]
    return {"cell": cell.name, "bytes": cell.num_bytes, "flops": cell.flops, "times": times}


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("experts", "linears", "all"), default="all")
    parser.add_argument("--rows", default="decode,prefill")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--share", type=int, nargs=2, help="(internal) compile a part")
    given = parser.parse_args()
    rows = (DECODE_ROWS if "decode" in given.rows else ()) + (
        PREFILL_ROWS if "prefill" in given.rows else ()
    )
    wanted = kinds(given.part, rows)
    if given.share:
        share, num_shares = given.share
        compile_share(wanted[share::num_shares])
        return
    begin, num_shares = time.monotonic(), max(1, (os.cpu_count() or 2) - 2)
    command = [sys.executable, *sys.argv, "--share"]
    shares = [subprocess.Popen([*command, str(i), str(num_shares)]) for i in range(num_shares)]
    for process in shares:
        process.wait()
    print(f"{len(wanted)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    results, rest = [], 0
    parts = [expert_cells(rows)] if given.part != "linears" else []
    parts += [linear_cells(rows)] if given.part != "experts" else []
    for cell in itertools.chain(*parts):
        if time.monotonic() - begin > given.seconds:
            rest += 1
        else:
            results.append(reported(cell))
    print(f"{time.monotonic() - begin:.0f} s; {rest} cells left out")
    if given.json is not None:
        given.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
