"""Cells for tuning matrix products: shapes of V3.2 and GLM-5 layers, candidate tiles, calls.

In:  rows of a step. Out: `Cell`s: a call for a tile, the candidates (the one in use first), bytes
     and operations. Weights rotate through more bytes than the L2 cache holds, as in a model.
Not here: timing and compiling (tune_moe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.providers.external.deepgemm import BLOCK_ROWS
from gnomon.attention.providers.triton import linear, tiles
from gnomon.attention.providers.triton.linear_quantise import empty_rows, quantise_rows
from gnomon.attention.providers.triton.moe import Experts, Into, Rows, grouped
from gnomon.attention.providers.triton.moe_sort import sort_by_expert
from gnomon.attention.providers.triton.tiles import Tile

Shapes = Mapping[str, tuple[int, int, int]]
"""Experts, the shared one among them; hidden size; width of an expert."""
EXPERTS: Shapes = {"h128": (33, 7168, 2048), "tp8": (257, 7168, 256), "glm": (33, 6144, 2048)}
LINEARS = {  # of h128: (columns, width)
    "o": (7168, 16384), "q_b": (24576, 1536), "wq_b": (8192, 1536), "q_a|wk|kv_a": (2240, 7168),
    "dense up": (36864, 7168), "dense down": (7168, 18432),
}  # fmt: skip
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
    deepgemm: Callable[[Any], None] | None = None

    @property
    def floor(self) -> float:
        """Microseconds that bytes or products take at the ceilings measured on an H200."""
        return max(self.num_bytes / 4.264e6, self.flops / 1.481e9)


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
    """Tiles of a dense product, the one in use first; at most eight."""
    taken = tiles.linear_tile(num_rows, columns, width)
    found = [taken]
    if num_rows > 128:
        kinds = (
            (64, 128, 4, 3, 16),
            (64, 128, 4, 3, 8),
            (64, 128, 4, 3, 64),
            (64, 128, 4, 2, 16),
            (128, 128, 8, 4, 16),
            (128, 128, 8, 4, 8),
            (128, 64, 4, 4, 16),
        )
        found += [
            Tile(rows, wide, 128, warps=warps, stages=stages, group=group)
            for rows, wide, warps, stages, group in kinds
        ]
        return list(dict.fromkeys(found))
    kinds_of_few = (
        (64, 1, 4, 5),
        (64, 2, 4, 5),
        (64, 4, 4, 5),
        (128, 1, 4, 4),
        (128, 2, 4, 4),
        (128, 3, 4, 3),
        (128, 2, 8, 4),
    )
    for wide, share, warps, stages in kinds_of_few:
        programs = share * tiles.SM_COUNT
        tile = tiles.split_tile(taken.rows, columns, width, wide, programs)
        found.append(replace(tile, warps=warps, stages=stages))
    return list(dict.fromkeys(found))


def expert_candidates(choice: Tile) -> list[Tile]:
    """Tiles of a grouped product, the one in use first."""
    found = [choice]
    if choice.rows > 64:
        kinds = ((128, 8, 3), (128, 8, 4), (64, 4, 2), (64, 4, 3), (64, 8, 3))
        found += [
            Tile(rows, 128, 128, warps=warps, stages=stages, group=16)
            for rows, warps, stages in kinds
        ]
        return list(dict.fromkeys(found))
    for rows in sorted({max(16, choice.rows // 2), choice.rows, min(64, 2 * choice.rows)}):
        wide = streaming_tiles(rows, (64, 128) if rows < 64 else (32, 64, 128), (3, 4, 5))
        found += wide
        found += [replace(tile, swap_below=128) for tile in wide if rows == 64]
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
            yield Cell(cell, run, tuple(found), found[0], num_bytes, flops, run.deepgemm)


class LinearRun:
    """A dense product over weights in turn."""

    def __init__(self, x: tuple[Tensor, Tensor], copies: list[tuple[Tensor, Tensor]]) -> None:
        self._x, self._copies, self._turn = x, copies, 0

    def __call__(self, tile: Tile) -> None:
        linear.run_linear(self._x, self._next(), torch.bfloat16, tile)

    def deepgemm(self, library: Any) -> None:
        """The same by DeepGEMM; the first call of a shape compiles."""
        weight = self._next()
        shape = (self._x[0].shape[0], weight[0].shape[0])
        out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for first in range(0, shape[0], BLOCK_ROWS):
            part = slice(first, first + BLOCK_ROWS)
            x = self._x[0][part], self._x[1][part]
            library.fp8_gemm_nt(x, weight, out[part], disable_ue8m0_cast=True)

    def _next(self) -> tuple[Tensor, Tensor]:
        self._turn += 1
        return self._copies[self._turn % len(self._copies)]


class ExpertRun:
    """Both grouped products of a mixture over random routing."""

    def __init__(self, num_rows: int, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]):
        num_experts, hidden, width = down[0].shape
        noise = torch.rand(num_rows, num_experts - 1, device="cuda")
        chosen = noise.topk(8, dim=1).indices
        shared = torch.full_like(chosen[:, :1], num_experts - 1)
        self.ids = torch.cat((chosen, shared), 1)
        self.blocks = {n: sort_by_expert(self.ids, num_experts, n) for n in (16, 32, 64, 128)}
        self._block = tiles.moe_tiles(self.ids.numel(), down[0], is_fp8=True).fused.rows
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
        blocks = self.blocks[max(tile.rows, self._block)]
        grouped(Rows(*self._active), weight, blocks, tile, into)


def expert_cells(rows: tuple[int, ...], experts: Shapes) -> Iterator[Cell]:
    """The two grouped products of a mixture, each by itself."""
    for name, (num_experts, hidden, width) in experts.items():
        gate_up, down = weight(num_experts, 2 * width, hidden), weight(num_experts, hidden, width)
        for num_rows in rows:
            run = ExpertRun(num_rows, gate_up, down)
            num_pairs, touched = run.ids.numel(), run.ids.unique().numel()
            taken = tiles.moe_tiles(num_pairs, down[0], is_fp8=True)
            for label, call, choice, size in (
                ("gate_up", run.first, taken.fused, 2 * width * hidden),
                ("down", run.second, taken.down, hidden * width),
            ):
                found = expert_candidates(choice)
                cell = f"{label} {name} x {num_rows}"
                flops, num_bytes = 2 * num_pairs * size, touched * size
                yield Cell(cell, call, tuple(found), choice, num_bytes, flops)
