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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gnomon.attention.providers.triton import linear, tiles
from gnomon.attention.providers.triton.linear_quantise import empty_rows, quantise_rows
from gnomon.attention.providers.triton.moe import Experts, Into, Rows, grouped
from gnomon.attention.providers.triton.moe_sort import sort_by_expert
from gnomon.attention.providers.triton.tiles import Tile

EXPERTS = {"h128": (32, 7168, 2048), "tp8": (256, 7168, 256), "glm": (32, 6144, 2048)}
LINEARS = {
    "qkv_a": (2112, 7168), "q_b 128": (24576, 1536), "wq_b": (8192, 1536), "o 128": (7168, 16384),
    "q_b 16": (3072, 1536), "o 16": (7168, 2048), "dense up": (36864, 7168),
    "dense down": (7168, 18432), "shared up tp8": (512, 7168), "shared down tp8": (7168, 256),
}  # fmt: skip
DECODE_ROWS = (1, 16, 64, 128)
PREFILL_ROWS = (8192,)
L2_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape: the call for a tile, the candidates, what it moves and computes."""

    name: str
    run: Callable[[Tile], object]
    candidates: tuple[Tile, ...]
    taken: Tile
    num_bytes: int
    flops: int


def weight(*shape: int) -> tuple[Tensor, Tensor]:
    """Random codes of every sign and size, and scales."""
    codes = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")
    codes |= torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda") << 7
    *lead, rows, columns = shape
    scales = torch.rand(*lead, -(-rows // 128), -(-columns // 128), device="cuda") * 1e-3
    return codes.view(torch.float8_e4m3fn), scales


def streaming_tiles(rows: int, columns: tuple[int, ...], stages: tuple[int, ...]) -> list[Tile]:
    """For few rows: every width, depth of pipeline and number of warps that may pay."""
    return [
        Tile(rows, width, 128, warps=warps, stages=depth)
        for width in columns
        for depth in stages
        for warps in ((4,) if width <= 64 else (4, 8))
    ]


def linear_candidates(num_rows: int, columns: int, width: int) -> list[Tile]:
    """Tiles of a dense product, the one in use first."""
    taken = tiles.linear_tile(num_rows, columns, width)
    found = [taken]
    if num_rows > 128:
        kinds = ((128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 3), (64, 128, 4, 4))
        found += [
            Tile(rows, wide, 128, warps=warps, stages=stages, group=group)
            for rows, wide, warps, stages in kinds
            for group in (8, 32)
        ]
        return list(dict.fromkeys(found))
    for tile in streaming_tiles(taken.rows, (32, 64, 128), (4, 6)):
        for splits in sorted({1, taken.splits, 2 * taken.splits}):
            if splits * 512 <= max(width, 512):
                found.append(Tile(tile.rows, tile.columns, 128, splits, tile.warps, tile.stages))
    return list(dict.fromkeys(found))


def expert_candidates(num_rows: int, choice: Tile) -> list[Tile]:
    """Tiles of a grouped product, the one in use first."""
    found = [choice]
    if num_rows > 128:
        found += [
            Tile(rows, 128, 128, warps=warps, stages=stages, group=group)
            for rows, warps in ((64, 4), (64, 8), (128, 8))
            for stages in (3, 4)
            for group in (4, 16)
        ]
        return list(dict.fromkeys(found))
    for rows in sorted({choice.rows, min(64, 2 * choice.rows)}):
        found += streaming_tiles(rows, (64, 128), (3, 4))
    return list(dict.fromkeys(found))


def linear_cells(rows: tuple[int, ...]) -> Iterator[Cell]:
    """Dense products."""
    for name, (columns, width) in LINEARS.items():
        copies = [weight(columns, width) for _ in range(-(-L2_BYTES // (columns * width)))]
        for num_rows in rows:
            x = quantise_rows(torch.randn(num_rows, width, device="cuda"), False)
            found = linear_candidates(num_rows, columns, width)
            run = LinearRun(x, copies)
            num_bytes = columns * width + num_rows * (width + 2 * columns)
            cell = f"linear {name} x {num_rows}"
            flops = 2 * num_rows * columns * width
            yield Cell(cell, run, tuple(found), found[0], num_bytes, flops)


class LinearRun:
    """A dense product over weights in turn."""

    def __init__(self, x: tuple[Tensor, Tensor], copies: list[tuple[Tensor, Tensor]]) -> None:
        self._x, self._copies, self._turn = x, copies, 0

    def __call__(self, tile: Tile) -> None:
        self._turn += 1
        weight = self._copies[self._turn % len(self._copies)]
        linear.run_linear(self._x, weight, torch.bfloat16, tile)


class ExpertRun:
    """Both grouped products of a mixture over random routing."""

    def __init__(self, num_rows: int, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]):
        num_experts, hidden, width = down[0].shape
        noise = torch.rand(num_rows, num_experts, device="cuda")
        self.ids = noise.topk(min(8, num_experts), dim=1).indices
        self.blocks = {n: sort_by_expert(self.ids, num_experts, n) for n in (16, 32, 64, 128)}
        self._x = quantise_rows(torch.randn(num_rows, hidden, device="cuda"), False)
        self._weights = gate_up, down
        num_pairs = self.ids.numel()
        self._active = empty_rows(num_pairs, width, torch.device("cuda"))
        self._active[0].view(torch.uint8).fill_(40)
        self._active[1].fill_(0.01)
        self._both = torch.empty(num_pairs, 2 * width, dtype=torch.float32, device="cuda")
        self._parts = torch.empty(num_pairs, hidden, dtype=torch.bfloat16, device="cuda")
        self._shares = torch.rand(self.ids.shape, device="cuda")

    def first(self, tile: Tile) -> None:
        """Gate and up: with their activation where a tile holds a group, else apart."""
        k = self.ids.shape[1]
        into = Into(self._active[0], k, self._active[1], is_fused=True)
        if tile.columns < 128:
            into = Into(self._both, k)
        weight = Experts(*self._weights[0])
        grouped(Rows(*self._x), weight, self.blocks[tile.rows], tile, into)

    def second(self, tile: Tile) -> None:
        """Down, weighted."""
        weight, into = Experts(*self._weights[1]), Into(self._parts, 1, shares=self._shares)
        grouped(Rows(*self._active), weight, self.blocks[tile.rows], tile, into)


def expert_cells(rows: tuple[int, ...]) -> Iterator[Cell]:
    """The two grouped products of a mixture, each by itself."""
    for name, (num_experts, hidden, width) in EXPERTS.items():
        gate_up, down = weight(num_experts, 2 * width, hidden), weight(num_experts, hidden, width)
        for num_rows in rows:
            run = ExpertRun(num_rows, gate_up, down)
            num_pairs, touched = run.ids.numel(), run.ids.unique().numel()
            taken = tiles.moe_tiles(num_pairs, down[0], is_fp8=True)
            for label, call, choice, size in (
                ("gate_up", run.first, taken.fused, 2 * width * hidden),
                ("down", run.second, taken.down, hidden * width),
            ):
                found = expert_candidates(num_rows, choice)
                cell = f"{label} {name} x {num_rows}"
                flops, num_bytes = 2 * num_pairs * size, touched * size
                yield Cell(cell, call, tuple(found), choice, num_bytes, flops)


def kinds(part: str, rows: tuple[int, ...]) -> list[tuple[str, Tile]]:
    """Every kernel and tile that the cells of a part will want."""
    found: list[tuple[str, Tile]] = []
    for num_rows in rows:
        for columns, width in LINEARS.values() if part != "experts" else ():
            found += [("linear", t) for t in linear_candidates(num_rows, columns, width)]
        for shape in EXPERTS.values() if part != "linears" else ():
            down = torch.empty(*shape, dtype=torch.uint8, device="meta")
            taken = tiles.moe_tiles(8 * num_rows, down, is_fp8=True)
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
    torch.cuda._sleep(2_000_000)
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
