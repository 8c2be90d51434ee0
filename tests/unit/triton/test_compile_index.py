"""Index scores and top-k at real widths, compiled for sm_90 (80, 89, 120 once): no spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.attention.providers.triton.index_views import CODE, PAGED_TILES, TILES, Tile
from gnomon.attention.providers.triton.topk import Search, search_for
from tests.unit.triton.ahead_of_time import Build, Report, compile_all, faults

PACKAGE = "gnomon.attention.providers.triton"
STRIDES = ("q_row", "q_head", "weights_row", "out_row")
DTYPES = {"fp8": CODE, "bf16": torch.bfloat16, "fp32": torch.float32}
MODULES = {
    "scores_kernel": "index_tiles",
    "code_scores_kernel": "index_codes",
    "paged_scores_kernel": "index_tiles",
    "topk_kernel": "topk_tiles",
}
ANYWHERE = {  # pointers whose alignment the kernels are not compiled for
    "count_ptr",
    "request_ptr",
    "pages_ptr",
    "kept_ptr",
    "margin_ptr",
    "nan_ptr",
}
NUMBERS = {"fp8": "*fp8e4nv", "bf16": "*bf16", "fp32": "*fp32"}


def flat(dtype: str, heads: int, arch: int = 90) -> Build:
    """scores_kernel for rows of ``heads`` heads of 128 columns."""
    tile = TILES[DTYPES[dtype]]
    constants = {"H": heads, "HEADS": heads, "D": 128, "DIM": 128, "ROWS": tile.rows(heads)}
    constants |= {"BLOCK": tile.keys}
    signature = {
        "q_ptr": NUMBERS[dtype],
        "weights_ptr": "*fp32",
        "keys_ptr": NUMBERS[dtype],
        "count_ptr": "*i32",
        "out_ptr": "*fp32",
        "scale": "fp32",
        **dict.fromkeys(("num_rows", "num_keys", *STRIDES[:3], "keys_row", "out_row"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return build("scores_kernel", signature, constants, tile, arch, (*STRIDES, "keys_row"))


def flat_codes(heads: int, arch: int = 90, tile: Tile = TILES[CODE]) -> Build:
    """code_scores_kernel for rows of ``heads`` heads of 128 columns."""
    constants = {"H": heads, "HEADS": heads, "DIM": 128, "ROWS": tile.rows(heads)}
    constants |= {"BLOCK": tile.keys}
    signature = {
        "q_ptr": "*fp8e4nv",
        "weights_ptr": "*fp32",
        "q_scale_ptr": "*fp32",
        "keys_ptr": "*fp8e4nv",
        "key_scale_ptr": "*fp32",
        "count_ptr": "*i32",
        "out_ptr": "*fp32",
        "scale": "fp32",
        **dict.fromkeys(("num_rows", "num_keys", "weights_row", "out_row"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return build("code_scores_kernel", signature, constants, tile, arch, ("weights_row", "out_row"))


def paged(dtype: str, heads: int, kind: str, arch: int = 90) -> Build:
    """paged_scores_kernel over pages of 64, for bf16 queries (fp32 ones over fp32)."""
    tile = PAGED_TILES[DTYPES["bf16" if kind == "decoded" else dtype]]
    constants = {"H": heads, "HEADS": heads, "D": 128, "DIM": 128, "PAGE": 64}
    constants |= {"BLOCK": tile.keys, "KEYS": kind}
    constants |= {"CAST": ""}
    constants |= {"NATIVE": arch >= 89, "FILLS": kind == "plain"}
    constants |= {"STAGES": tile.stages}
    signature = {
        "q_ptr": NUMBERS["fp32" if dtype == "fp32" else "bf16"],
        "weights_ptr": "*fp32",
        "keys_ptr": "*u8" if kind == "decoded" else NUMBERS[dtype],
        "key_scale_ptr": "constexpr" if kind == "plain" else "*fp32",
        "pages_ptr": "*i32",
        "request_ptr": "*i32",
        "count_ptr": "*i32",
        "out_ptr": "*fp32",
        "scale": "fp32",
        **dict.fromkeys(("width", "least", *STRIDES[:3], "pages_row"), "i32"),
        **dict.fromkeys(("keys_page", "scale_page", "out_row"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    constants |= {"key_scale_ptr": None} if kind == "plain" else {}
    aligned = (*STRIDES, "keys_page", "scale_page")
    return build("paged_scores_kernel", signature, constants, tile, arch, aligned)


def best(sizes: Search, is_fused: bool, arch: int = 90) -> Build:
    """topk_kernel for k 2048, alone or with slots."""
    cap, sample, block = sizes.cap, sizes.sample, sizes.block
    constants = {"K": 2048, "CAP": cap, "SAMPLE": sample, "BLOCK": block}
    constants |= {"CHUNK": sizes.chunk, "LIST": sizes.chunk, "STAGES": sizes.stages}
    constants |= {"PAGE": 64 if is_fused else 1, "LOOKS": not is_fused}
    optional = {"slots_ptr": "*i64", "pages_ptr": "*i32", "request_ptr": "*i32"}
    signature = {
        "scores_ptr": "*fp32",
        "count_ptr": "*i32",
        "ids_ptr": "*i32",
        "slots_ptr": "constexpr",
        "kept_ptr": "*i32",
        "margin_ptr": "*fp32",
        "nan_ptr": "*i1",
        **dict.fromkeys(("pages_ptr", "request_ptr"), "constexpr"),
        "scratch_ptr": "*i32",
        **dict.fromkeys(("num_rows", "num_columns", "num_pages", "scores_row"), "i32"),
        **dict.fromkeys(("ids_row", "slots_row", "pages_row", "scratch_row", "top"), "i32"),
        "target": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    signature |= optional if is_fused else {}
    constants |= {} if is_fused else dict.fromkeys(optional)
    aligned = ("scores_row", "ids_row", "slots_row")
    launch = Tile(1, 1, 2, sizes.warps, sizes.registers)
    return build("topk_kernel", signature, constants, launch, arch, aligned)


def build(
    kernel: str,
    signature: dict[str, str],
    constants: dict[str, object],
    tile: Tile,
    arch: int,
    aligned: tuple[str, ...],
) -> Build:
    """Launched as ``tile`` says."""
    module = f"{PACKAGE}.{MODULES[kernel]}"
    pointers = (n for n, kind in signature.items() if kind.startswith("*") and n not in ANYWHERE)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    is_capped = tile.registers is not None and (arch == 90 or kernel == "topk_kernel")
    options |= {"maxnreg": tile.registers} if is_capped else {}
    return Build(module, kernel, signature, constants, options, arch, (*pointers, *aligned))


BUILDS = {
    "flat fp8 64": (flat_codes(64), "m64n128k32"),
    "flat fp8 32": (flat_codes(32), "m64n128k32"),
    "flat fp8 fixed": (flat_codes(64, tile=PAGED_TILES[CODE]), "m64n64k32"),
    "flat bf16": (flat("bf16", 64), "m64n128k16"),
    "flat fp32 64": (flat("fp32", 64), ""),
    "flat fp32 32": (flat("fp32", 32), ""),
    "paged fp8 64": (paged("fp8", 64, "codes"), "m64n64k32"),
    "paged fp8 32": (paged("fp8", 32, "codes"), "m64n32k32"),
    "paged bf16": (paged("bf16", 64, "plain"), "m64n64k16"),
    "paged fp32 64": (paged("fp32", 64, "plain"), ""),
    "paged fp32 32": (paged("fp32", 32, "plain"), ""),
    "paged fp32 16": (paged("fp32", 16, "plain"), ""),
    "top-k of many short rows": (best(search_for(2048, 4096, 8192, 132), True), ""),
    "top-k of many rows": (best(search_for(2048, 4096, 65_536, 132), False), ""),
    "top-k of many long rows": (best(search_for(2048, 4096, 131_072, 132), True), ""),
    "top-k of few rows": (best(search_for(2048, 64, 131_072, 132), True), ""),
}
OTHERS = [
    paged("fp8", 64, "decoded", arch=80),
    flat_codes(64, arch=89),
    flat_codes(64, arch=120),
    flat("bf16", 64, arch=80),
    flat("fp32", 64, arch=80),
    paged("fp32", 64, "plain", arch=80),
    best(search_for(2048, 64, 65_536, 132), True, arch=80),
]


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    builds = [build for build, _ in BUILDS.values()]
    made = compile_all([*builds, *OTHERS])
    names = [*BUILDS, *(f"other {place}" for place in range(len(OTHERS)))]
    return dict(zip(names, made, strict=True))


def test_nothing_spills_and_everything_fits(reports: dict[str, Report]) -> None:
    scores = [reports[name] for name in BUILDS if not name.startswith("top-k")]
    assert faults(scores) == []


def test_other_gpus_run_them_as_well(reports: dict[str, Report]) -> None:
    """The assembler of sm_120 keeps two numbers out of 128 registers where it could take more."""
    others = [report for name, report in reports.items() if name.startswith("other")]
    scores = [report for report in others if not report.label.startswith("topk_kernel")]
    assert len(scores) == len(OTHERS) - 1
    assert max(report.stack for report in scores) <= 8
    assert faults([replace(report, stack=0) for report in scores]) == []


def test_the_top_k_keeps_to_its_registers(reports: dict[str, Report]) -> None:
    """What many programs at once allow: its loops fit, a few numbers of its outer loop do not."""
    for report in reports.values():
        if report.label.startswith("topk_kernel"):
            assert faults([replace(report, stack=0)]) == []
            assert report.registers <= 128, report
            assert report.stack <= 192, report


@pytest.mark.parametrize("name", [name for name, (_, shape) in BUILDS.items() if shape])
def test_dots_are_wgmma_of_the_whole_tile(reports: dict[str, Report], name: str) -> None:
    assert reports[name].wgmma == (BUILDS[name][1],)
