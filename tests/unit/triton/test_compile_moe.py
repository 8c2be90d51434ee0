"""Matrix products at real widths, compiled for sm_90 (80, 89, 120 once): no spills, WGMMA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gnomon.attention.providers.triton.tiles import Kind, Tile, linear_tile, moe_tiles
from tests.unit.triton.ahead_of_time import Build, Report, compile_all, faults

PACKAGE = "gnomon.attention.providers.triton"
POINTERS = ("x", "x_scales", "weight", "scales", "shares", "out", "out_scales")
SIZES = ("num_rows", "num_n", "K", "k_split", "num_m")
STRIDES = ("x_stride", "xs_row", "xs_group", "w_expert", "w_row", "s_expert", "s_row")
OUT_STRIDES = ("out_split", "out_stride", "os_row", "os_group")
ALIGNED = ("num_n", "K", "k_split", "x_stride", "w_expert", "w_row", "out_split", "out_stride")


def product(tile: Tile, kind: str, arch: int = 90, **constants: Any) -> Build:
    """``multiply`` with a tile; kind: "dense", "fused" (gate and up), "down"."""
    is_native = arch >= 89
    modes = {
        "TOP_K": 8 if kind == "fused" else 1,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "GROUP_M": tile.group,
        "IS_SPLIT": tile.splits > 1,
        "SWAP": tile.is_swapped,
        "HAS_EXPERTS": kind != "dense",
        "HAS_SHARES": kind == "down",
        "IS_FP8": True,
        "NATIVE": is_native,
        "FUSED": kind == "fused",
        "EVEN_K": True,
        "IS_POWER_OF_TWO": False,
        "STAGES": tile.stages,
        "IS_EARLY": tile.splits > 1 and arch >= 90,
        "PER_BLOCK": 1,
    } | constants
    codes = ("*fp8e4nv" if is_native else "*u8") if modes["IS_FP8"] else "*bf16"
    out = "*bf16"
    if tile.splits > 1:
        out = "*fp32"
    elif modes["FUSED"] and modes["IS_FP8"]:
        out = "*u8"
    signature = {
        **dict.fromkeys(POINTERS, "*fp32"),
        **dict.fromkeys(("pairs", "expert_of_block", "num_blocks"), "*i32"),
        **dict.fromkeys((*SIZES, *STRIDES, *OUT_STRIDES), "i32"),
        **dict.fromkeys(modes, "constexpr"),
    }
    signature |= {"x": codes, "weight": codes, "out": out, "xs_row": "constexpr"}
    pointers = tuple(name for name, form in signature.items() if form.startswith("*"))
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    values = modes | {"xs_row": 1}
    return Build(
        f"{PACKAGE}.products", "multiply", signature, values, options, arch, (*pointers, *ALIGNED)
    )


STREAMING = [
    product(Tile(16, 128, 128, warps=4, stages=3), "fused"),
    product(Tile(32, 128, 128, warps=4, stages=3), "fused"),
    product(Tile(16, 128, 128, warps=4, stages=4), "down"),
    product(Tile(32, 128, 128, warps=4, stages=5), "down", PER_BLOCK=2),
    product(Tile(16, 128, 128, splits=5, warps=4, stages=4), "dense"),
    product(Tile(32, 128, 128, warps=8, stages=4), "dense"),
    product(Tile(64, 128, 128, splits=2, warps=4, stages=4), "dense"),
    product(Tile(16, 64, 128, splits=2, warps=4, stages=5), "dense"),
    product(Tile(64, 64, 128, splits=2, warps=4, stages=5), "dense"),
    product(Tile(64, 128, 128, warps=4, stages=4), "down"),
    product(Tile(16, 128, 64, warps=4, stages=3), "fused", IS_FP8=False),
]
WIDE = [
    product(Tile(64, 128, 128, warps=8, stages=5), "fused"),
    product(Tile(128, 128, 128, warps=8, stages=3), "fused"),
    product(Tile(128, 128, 128, warps=8, stages=4), "down"),
    product(Tile(128, 128, 128, warps=8, stages=4), "dense"),
    product(Tile(64, 128, 128, warps=4, stages=3), "dense"),
    product(Tile(128, 128, 64, warps=8, stages=3), "fused", IS_FP8=False),
]
ARCHITECTURES = {80: Kind.OLDER, 89: Kind.NEWER, 120: Kind.NEWER}


def taken(arch: int) -> list[Build]:
    """The widest tiles that run there, and those of 32 rows with the most stages elsewhere."""
    kind = ARCHITECTURES[arch]
    found = [product(linear_tile(number, 7168, 16384, kind), "dense", arch) for number in (32, 512)]
    for is_fp8, dtype in ((True, torch.uint8), (False, torch.bfloat16)):
        down = torch.empty(256, 7168, 2048, device="meta", dtype=dtype)
        for num_pairs in (8192, 65536) if is_fp8 else (65536,):
            pair = moe_tiles(num_pairs, down, is_fp8, kind)
            tiles = ("fused", pair.fused), ("down", pair.down)
            found += [product(tile, name, arch, IS_FP8=is_fp8) for name, tile in tiles]
    return found


OTHERS = [build for arch in ARCHITECTURES for build in taken(arch)]


def plain(module: str, kernel: str, pointers: dict[str, str], **others: Any) -> Build:
    """A kernel without products; ``others``: sizes as "i32", constants as they are."""
    sizes = {name: kind for name, kind in others.items() if kind == "i32"}
    constants = {name: value for name, value in others.items() if name not in sizes}
    signature = pointers | {n: kind if kind == "i32" else "constexpr" for n, kind in others.items()}
    aligned = (*pointers, *(size for size in sizes if size in ("K", "width", "x_stride")))
    options = {"num_warps": 4}
    return Build(f"{PACKAGE}.{module}", kernel, signature, constants, options, 90, aligned)


SORT = dict.fromkeys(("ids",), "*i64")
FEW = {**SORT, **dict.fromkeys(("pairs", "expert_of_block", "num_blocks"), "*i32")}
PLACES = dict.fromkeys(("counts", "totals", "num_blocks"), "*i32")
WRITE = {**SORT, **dict.fromkeys(("places", "totals", "pairs", "expert_of_block"), "*i32")}
ROWS = {"x": "*bf16", "codes": "*u8", "scales": "*fp32"}
QUANTISE = {"num_rows": "i32", "K": "i32", "x_stride": "i32", "s_group": "i32", "ROWS": 1}
QUANTISE |= {"GROUPS": 8, "WITH_SILU": False, "IS_POWER_OF_TWO": False, "NATIVE": True}
SMALL = [
    plain("moe_sort", "sort_few", FEW, num_pairs="i32", EXPERTS=256, CHUNK=1024, BM=16),
    plain(
        "moe_sort", "count_chunks", {**SORT, "counts": "*i32"}, num_pairs="i32", EXPERTS=256,
        CHUNK=1024,
    ),
    plain("moe_sort", "place_chunks", PLACES, num_chunks="i32", EXPERTS=256, BM=128, TILE=16),
    plain(
        "moe_sort", "write_pairs", WRITE, num_pairs="i32", num_chunks="i32", most="i32",
        EXPERTS=256, CHUNK=1024, BM=128, BLOCKS=16,
    ),
    plain("linear_quantise", "quantise", ROWS, **QUANTISE),
    plain("linear_quantise", "quantise", ROWS, **QUANTISE | {"WITH_SILU": True}),
    plain(
        "moe", "add_shares", {"parts": "*bf16", "ids": "*i64", "out": "*bf16"},
        num_experts_per_row="i32", width="i32", K=8, BLOCK=1024,
    ),
    plain(
        "products", "add_splits", {"parts": "*fp32", "out": "*bf16"}, num_rows="i32", width="i32",
        SPLITS=4, BLOCK=1024, IS_EARLY=True,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_all(STREAMING + WIDE + OTHERS + SMALL)


def test_no_kernel_spills_or_asks_for_too_much(reports: list[Report]) -> None:
    assert faults(reports) == []


def test_sm_90_runs_on_wgmma(reports: list[Report]) -> None:
    streaming, wide = reports[: len(STREAMING)], reports[len(STREAMING) : len(STREAMING + WIDE)]
    assert all(shape.startswith("m64n") for report in streaming + wide for shape in report.wgmma)
    assert all(report.wgmma for report in streaming + wide)
    assert "m64n16k32" in streaming[0].wgmma
    assert "m64n128k32" in wide[2].wgmma


def test_tiles_of_other_devices_fit_the_smallest(reports: list[Report]) -> None:
    others = reports[len(STREAMING + WIDE) : len(STREAMING + WIDE + OTHERS)]
    assert max(report.shared for report in others) <= 101_376  # sm_89, sm_120


def test_two_programs_of_few_rows_share_a_processor(reports: list[Report]) -> None:
    assert all(report.shared <= 232_448 // 2 for report in reports[: len(STREAMING)])
