"""Attention kernels at real widths, compiled for sm_90 (80, 89, 120 once): no spills, WGMMA."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.providers.triton.attention_dense import choose_dense_tile, cut
from gnomon.attention.providers.triton.attention_tiles import (
    FEW_HEADS,
    FEW_HEADS_DECODE,
    FEW_HEADS_FEW_ROWS,
    MANY_HEADS,
    MANY_HEADS_FEW_ROWS,
    ListTile,
    choose_tile,
)
from tests.unit.triton.ahead_of_time import Build, Report, compile_all, faults

PACKAGE = "gnomon.attention.providers.triton"
LISTS = {
    **dict.fromkeys(("q", "q_rope", "entries"), "*bf16"),
    "slots": "*i64",
    "count": "*i32",
    **{"out": "*bf16", "lse": "*fp32", "scale": "fp32"},
    **dict.fromkeys(("page_stride", "num_splits"), "i32"),
    **dict.fromkeys(("q_row", "q_head"), "i32"),
    "q_column": "constexpr",
    **dict.fromkeys(("rope_row", "rope_head"), "i32"),
    **{"rope_column": "constexpr", "slots_row": "i32", "slots_column": "constexpr"},
}
SHAPE = {"q_column": 1, "rope_column": 1, "slots_column": 1, "DC": 512, "DR": 64}
SHAPE |= {"DCP": 512, "DRP": 64, "PAGE": 0, "SPLIT_KEYS": 0}
V32, GLM = (192, 128), (256, 256)  # a head's width in keys (nope and rope) and in values
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
STRIDES = ("q_row", "q_head", "rope_row", "rope_head", "slots_row", "page_stride")


def lists(tile: ListTile, is_packed: bool, is_split: bool, arch: int = 90) -> Build:
    """attend_lists with a tile."""
    heads, keys, num_warps, num_stages = tile.heads, tile.keys, tile.num_warps, tile.num_stages
    constants = SHAPE | {"H": heads, "BH": heads, "BN": keys, "STAGES": num_stages}
    constants |= {"IS_SPLIT": is_split, "NATIVE": arch >= 89, "READS_AHEAD": tile.reads_ahead}
    constants |= {"PARTS": tile.parts}
    constants |= {"IS_EARLY": is_split and arch >= 90}
    constants |= {"GROUPS": 4, "WIDTH": 656} if is_packed else {"GROUPS": 0, "WIDTH": 576}
    signature = LISTS | dict.fromkeys(constants, "constexpr")
    signature |= {"entries": "*u8" if is_packed else "*bf16"}
    parts = "*fp16" if is_packed else "*fp32"
    signature |= {"out": parts if is_split else "*bf16"}
    aligned = (*(name for name, kind in signature.items() if kind.startswith("*")), *STRIDES)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    module = f"{PACKAGE}.attention_lists"
    return Build(module, "attend_lists", signature, constants, options, arch, aligned)


def dense(widths: tuple[int, int], dtype: torch.dtype = torch.bfloat16, arch: int = 90) -> Build:
    """attend_dense for heads of these widths (key, value) with the tile that they are given."""
    tile = choose_dense_tile(*widths, dtype, arch == 90)
    first, rest = cut(widths[0])
    constants = {"q_column": 1, "k_column": 1, "v_column": 1, "H": 64, "D": widths[0]}
    constants |= {"DV": widths[1], "DVP": widths[1], "DA": first, "DB": rest}
    constants |= {"BM": tile.rows, "BN": tile.keys, "STAGES": tile.num_stages}
    strides = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")
    signature = {
        **dict.fromkeys("qkv", POINTERS[dtype]),
        **{
            "visible": "*i32",
            "out": POINTERS[dtype],
            "lse": "*fp32",
            "scale": "fp32",
            "num_rows": "i32",
        },
        **{"q_row": "i32", "q_head": "i32", "q_column": "i32"},
        **{"k_row": "i32", "k_head": "i32", "k_column": "i32"},
        **{"v_row": "i32", "v_head": "i32", "v_column": "i32"},
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = (*"qkv", "visible", "out", "lse", *strides)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    module = f"{PACKAGE}.attention_dense"
    return Build(module, "attend_dense", signature, constants, options, arch, aligned)


SPARSE = [
    lists(MANY_HEADS[False], is_packed=False, is_split=False),
    lists(MANY_HEADS[True], is_packed=True, is_split=True),
    lists(MANY_HEADS[True], is_packed=True, is_split=False),
    lists(choose_tile(32, 512, torch.bfloat16, False), is_packed=False, is_split=False),
    lists(FEW_HEADS[False], is_packed=False, is_split=False),
    lists(FEW_HEADS[True], is_packed=True, is_split=True),
    lists(FEW_HEADS_FEW_ROWS, is_packed=True, is_split=True),
    lists(MANY_HEADS_FEW_ROWS, is_packed=True, is_split=True),
    lists(FEW_HEADS_DECODE, is_packed=False, is_split=True),
]
DENSE = [dense(V32), dense(GLM), dense(V32, torch.float32), dense(GLM, torch.float32)]
OLD = choose_tile(128, 512, torch.bfloat16, True, is_hopper=False)
OTHERS = [lists(OLD, is_packed=True, is_split=True, arch=arch) for arch in (80, 89, 120)]
OTHERS += [dense(V32, arch=80), *(dense(GLM, arch=arch) for arch in (80, 89, 120))]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_all(SPARSE + DENSE + OTHERS)


def test_no_kernel_spills_or_asks_for_too_much(reports: list[Report]) -> None:
    assert faults(reports) == []


def test_blocks_of_64_heads_and_of_rows_run_on_wgmma(reports: list[Report]) -> None:
    for report in reports[:3]:
        assert {"m64n256k16", "m64n32k16"} <= set(report.wgmma), report.label
    assert {"m64n128k16", "m64n64k16"} <= set(reports[len(SPARSE)].wgmma)
