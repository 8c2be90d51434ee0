"""Measure tiles of matrix products on a GPU, per shape: GB/s, TFLOP/s and the fastest tile.

In:  a CUDA device with Triton. Options: --part experts|linears|all, --rows decode,prefill or
     numbers, --models h128,tp8,glm (of experts), --seconds (a budget; cells left out are
     counted), --json FILE for all figures.
     ANCHORS=DIR: where DeepGEMM is (fetch_anchors.sh DIR); linears are timed with it too.
Out: one line per cell: floor, the fastest tile, the tile that tiles.py takes, DeepGEMM, each with
     its time; below it all tiles. Weights rotate through more bytes than the L2 cache holds, as in
     a model.
Kernels are compiled first, by a process per core, into the caches of Triton and DeepGEMM.
Usage: PYTHONPATH=src ANCHORS=DIR python bench/tune_moe.py --part linears --rows decode --seconds 45
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tune_moe_cells import (
    EXPERTS,
    LINEARS,
    Cell,
    ExpertRun,
    LinearRun,
    Shapes,
    expert_candidates,
    expert_cells,
    linear_candidates,
    linear_cells,
    weight,
)

from gnomon.attention.providers.external import deepgemm
from gnomon.attention.providers.external.places import Places
from gnomon.attention.providers.triton import tiles
from gnomon.attention.providers.triton.linear_quantise import quantise_rows
from gnomon.attention.providers.triton.tiles import Tile

DECODE_ROWS = (64, 1, 16)
PREFILL_ROWS = (8192,)


def kinds(part: str, rows: tuple[int, ...], experts: Shapes) -> list[tuple[str, Tile]]:
    """Every kernel and tile that the cells want."""
    found: list[tuple[str, Tile]] = []
    for num_rows in rows:
        for columns, width in LINEARS.values() if part != "experts" else ():
            found += [("linear", t) for t in linear_candidates(num_rows, columns, width)]
        for shape in experts.values() if part != "linears" else ():
            down = torch.empty(*shape, dtype=torch.uint8, device="meta")
            taken = tiles.moe_tiles(9 * num_rows, down, is_fp8=True)
            found += [("first", t) for t in expert_candidates(taken.fused)]
            found += [("second", t) for t in expert_candidates(taken.down)]
    unlike = {(kind, replace(t, splits=min(t.splits, 2))): (kind, t) for kind, t in found}
    return list(unlike.values())


def compile_share(wanted: list[tuple[str, Tile]]) -> None:
    """Run kernels once over small tensors, whose sizes are multiples of 16 as the real ones are."""
    x = quantise_rows(torch.randn(16, 8192, device="cuda"), False)
    small = LinearRun(x, [weight(512, 8192)])
    experts = ExpertRun(16, weight(16, 512, 512), weight(16, 512, 256))
    calls = {"linear": small, "first": experts.first, "second": experts.second}
    for kind, tile in wanted:
        try:
            calls[kind](tile)
        except Exception as error:
            print(f"not compiled: {kind} {shown(tile)}: {str(error)[:80]}", file=sys.stderr)


def library() -> Any:
    """DeepGEMM, None if ANCHORS is not set or it cannot be had."""
    folder = os.environ.get("ANCHORS")
    if not folder:
        return None
    try:
        return deepgemm.find(Places(folder))
    except Exception as error:
        print(f"no DeepGEMM: {str(error)[:100]}", flush=True)
        return None


def compile_deepgemm(rows: tuple[int, ...], share: int, num_shares: int) -> None:
    """Its kernels of the cells that fall to this process."""
    found = library()
    shapes = [(m, *shape) for shape in LINEARS.values() for m in rows]
    for num_rows, columns, width in shapes[share::num_shares] if found is not None else ():
        x = quantise_rows(torch.ones(num_rows, width, device="cuda"), False)
        try:
            LinearRun(x, [weight(columns, width)]).deepgemm(found)
        except Exception as error:
            print(f"DeepGEMM {num_rows}x{columns}x{width}: {str(error)[:100]}", file=sys.stderr)


def timed(cell: Cell, call: Callable[[], object]) -> float:
    """Microseconds of one call, captured: calls in a row that last some milliseconds."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 3 if cell.flops > 1e11 else 40
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1000 / count


def measure(cell: Cell) -> list[tuple[float, Tile]]:
    """Sorted times of the candidates that run."""
    found: list[tuple[float, Tile]] = []
    for tile in cell.candidates:
        try:
            call = functools.partial(cell.run, tile)
            call()
            torch.cuda.synchronize()
            found.append((timed(cell, call), tile))
        except Exception as error:
            print(f"{cell.name} {shown(tile)}: {str(error)[:60]}")
    return sorted(found, key=lambda pair: pair[0])


def shown(tile: Tile) -> str:
    """Short."""
    swapped = " swapped" if tile.swap_below > 64 else ""
    return (
        f"{tile.rows}x{tile.columns} s{tile.splits} w{tile.warps} st{tile.stages}{swapped} "
        f"g{tile.group if tile.group < 1000 else '-'}"
    )


def reported(cell: Cell, other: Any) -> dict[str, object]:
    """Measure a cell, by DeepGEMM (``other``) too if it is there, and print its lines."""
    found = measure(cell)
    if not found:
        return {"cell": cell.name}
    best, tile = found[0]
    theirs = float("nan")
    if other is not None and cell.deepgemm is not None:
        call = functools.partial(cell.deepgemm, other)
        try:
            call()
            theirs = timed(cell, call)
        except Exception as error:
            print(f"{cell.name} DeepGEMM: {str(error)[:100]}")
    now = {tile: us for us, tile in found}.get(cell.taken, float("nan"))
    print(
        f"{cell.name:24} floor {cell.floor:7.1f} best {best:8.1f} us = {cell.floor / best:4.2f} "
        f"{cell.num_bytes / best / 1e3:6.0f} GB/s {cell.flops / best / 1e6:6.0f} TF "
        f"{shown(tile):22} | now {now:8.1f} {shown(cell.taken)} | DeepGEMM {theirs:8.1f}"
    )
    times = [(us, shown(t)) for us, t in found]
    print("    " + "; ".join(f"{us:.1f} {name}" for us, name in times), flush=True)
    figures = {"bytes": cell.num_bytes, "flops": cell.flops, "deepgemm": theirs}
    return {"cell": cell.name, **figures, "times": times}


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("experts", "linears", "all"), default="all")
    parser.add_argument("--rows", default="decode,prefill")
    parser.add_argument("--models", default=",".join(EXPERTS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--share", type=int, nargs=2, help="(internal) compile a part")
    given = parser.parse_args()
    known = {"decode": DECODE_ROWS, "prefill": PREFILL_ROWS}
    rows = tuple(n for word in given.rows.split(",") for n in known.get(word) or (int(word),))
    experts = {name: EXPERTS[name] for name in given.models.split(",")}
    wanted = kinds(given.part, rows, experts)
    if given.share:
        share, num_shares = given.share
        compile_share(wanted[share::num_shares])
        if given.part != "experts":
            compile_deepgemm(rows, share, num_shares)
        return
    begin, num_shares = time.monotonic(), max(1, (os.cpu_count() or 2) - 2)
    command = [sys.executable, *sys.argv, "--share"]
    shares = [subprocess.Popen([*command, str(i), str(num_shares)]) for i in range(num_shares)]
    for process in shares:
        process.wait()
    print(f"{len(wanted)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    results, rest, other = [], 0, library()
    parts = [expert_cells(rows, experts)] if given.part != "linears" else []
    parts += [linear_cells(rows)] if given.part != "experts" else []
    for cell in itertools.chain(*parts):
        if time.monotonic() - begin > given.seconds:
            rest += 1
        else:
            results.append(reported(cell, other))
    print(f"{time.monotonic() - begin:.0f} s; {rest} cells left out")
    if given.json is not None:
        given.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
