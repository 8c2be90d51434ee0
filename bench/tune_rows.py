"""Row and cache kernels of the triton provider on this GPU: one line per kernel, about 30 s.

In:  any of norms, codes, writes, gathers (all by default); or tiles: writes with other tiles too.
     --json FILE: every line again, with the copy's own time beside.
Out: how much of what each tile writes equals the torch provider's, byte for byte; then per kernel
     and number of tokens: microseconds, GB/s (bytes read and written once), and the share of what
     torch's copy of as many bytes reaches, timed alike.
How: tiles are compiled first, by a process per core. Calls over as many sets of arguments as make
     256 MB, so that the second-level cache is cold, in one CUDA graph, so that no launch waits for
     Python; the median of 10 replays.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tune_rows_cells import Call, check, codes, gathers, norms, writes

from gnomon.attention.providers.triton import cache
from gnomon.attention.providers.triton.cache import RowsTile
from gnomon.bench.machine import describe_run

COLD_BYTES = 256 << 20
Known = dict[int, float]  # GB/s of a copy by its bytes


def microseconds(calls: list[Call]) -> float:
    """Median time of one call, from a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / len(calls) * 1e3


def copy_speed(num_bytes: int, known: Known) -> float:
    """GB/s of torch's copy that reads and writes ``num_bytes`` in all."""
    if num_bytes not in known:
        sets = sets_for(num_bytes)
        pairs = [
            torch.empty(2, num_bytes // 2, device="cuda", dtype=torch.uint8) for _ in range(sets)
        ]
        calls: list[Call] = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
        known[num_bytes] = num_bytes / microseconds(calls) / 1e3
    return known[num_bytes]


def sets_for(num_bytes: int) -> int:
    return max(2, min(200, COLD_BYTES // num_bytes))


@dataclass(frozen=True, slots=True)
class Cell:
    """A kernel over so many tokens, and torch's copy of as many bytes; times in microseconds."""

    kernel: str
    tokens: int
    num_bytes: int
    us: float
    copy_us: float

    @property
    def line(self) -> str:
        """What is printed of it."""
        speed, share = self.num_bytes / self.us / 1e3, self.copy_us / self.us
        return f"{self.kernel:48} {self.tokens:7} {self.us:8.2f} {speed:7.0f} {share:8.2f}"


def timed(name: str, n: int, num_bytes: int, make: Callable[[], Call], known: Known) -> Cell:
    """One cell, printed."""
    took = microseconds([make() for _ in range(sets_for(num_bytes))])
    cell = Cell(name, n, num_bytes, took, num_bytes / copy_speed(num_bytes, known) / 1e3)
    print(cell.line, flush=True)
    torch.cuda.empty_cache()
    return cell


TILES = [
    cache.TILE,
    *(replace(cache.TILE, latents=rows) for rows in (1, 2, 8, 16)),
    *(
        replace(cache.TILE, latents=rows, keys=2, heads=16, turned=16, num_warps=2)
        for rows in (1, 2, 4)
    ),
    *(
        replace(cache.TILE, latents=rows, keys=1, heads=8, turned=16, num_warps=1)
        for rows in (1, 2, 4)
    ),
    replace(cache.TILE, keys=8, heads=16, turned=64),
    replace(cache.TILE, keys=16, heads=64, turned=128),
    replace(cache.TILE, latents=8, keys=8, heads=32, turned=32, num_warps=8),
]


def compile_all() -> None:
    """Every tile's kernels into Triton's cache, by a process per core."""
    num_shares = min(len(TILES), max(1, (os.cpu_count() or 2) - 1))
    command = [sys.executable, __file__, "--share"]
    shares = [subprocess.Popen([*command, str(i), str(num_shares)]) for i in range(num_shares)]
    for process in shares:
        process.wait()


def all_cells(kinds: list[str], tiles: list[RowsTile]) -> Iterator[Cell]:
    """Every wanted kernel at every number of tokens."""
    known: Known = {}
    parts = {"norms": norms, "codes": codes, "gathers": gathers}
    wanted = kinds or [*parts, "writes"]
    for n in (64, 4096, 8192, 16384):
        for kind in parts:
            for cell in parts[kind](n) if kind in wanted else ():
                yield timed(cell[0], n, *cell[1:], known)
        for tile in tiles if {"writes", "tiles"} & set(wanted) else ():
            mark = f" {tile.latents}/{tile.keys}/{tile.heads}/{tile.turned} w{tile.num_warps}"
            for name, num_bytes, make in writes(n, tile):
                yield timed(name + mark, n, num_bytes, make, known)


def main() -> None:
    parser = argparse.ArgumentParser(description="Row and cache kernels beside a copy.")
    kinds = ("norms", "codes", "writes", "gathers", "tiles")
    parser.add_argument("kinds", nargs="*", metavar="|".join(kinds))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    given, begin = parser.parse_args(), time.time()
    if unknown := set(given.kinds) - set(kinds):
        parser.error(f"{sorted(unknown)}: allowed are {', '.join(kinds)}")
    if given.share:
        for tile in TILES[given.share[0] :: given.share[1]]:
            for _, _, make in writes(64, tile):
                make()()
        return
    tiles = TILES if "tiles" in given.kinds else [cache.TILE]
    if "tiles" in given.kinds:
        compile_all()
        print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    for tile in tiles:
        print(f"equal to the definition: {check(tile)}  {tile}", flush=True)
    print(f"{'kernel':48} {'tokens':>7} {'us':>8} {'GB/s':>7} {'of copy':>8}")
    cells = list(all_cells(given.kinds, tiles))
    if given.json is not None:
        run = describe_run(torch.device("cuda"))
        run["command"] = shlex.join(["python", *sys.argv])
        found = [asdict(cell) | {"of_copy": cell.copy_us / cell.us} for cell in cells]
        given.json.write_text(json.dumps({"run": run, "cells": found}, indent=1) + "\n")
    print(f"done in {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
