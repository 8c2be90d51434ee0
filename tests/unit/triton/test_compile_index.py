"""Index scores and top-k at real widths, compiled for sm_90 (80, 89, 120 once): no spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.attention.providers.triton import index_views
from gnomon.attention.providers.triton.index_views import CODE, PAGED_TILES, REGISTERS, TILES, Tile
from gnomon.attention.providers.triton.topk import PARTS, Search, Split, search_for
from tests.unit.triton.ahead_of_time import Build, Report, compile_all, faults

PACKAGE = "gnomon.attention.providers.triton"
STRIDES = ("q_row", "q_head", "weights_row", "out_row")
DTYPES = {"fp8": CODE, "bf16": torch.bfloat16, "fp32": torch.float32}
MODULES = {
    "scores_kernel": "index_tiles",
    "code_scores_kernel": "index_codes",
    "paged_scores_kernel": "index_tiles",
    "topk_kernel": "topk_tiles",
    "topk_parts_kernel": "topk_parts",
    "topk_settle_kernel": "topk_settle",
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


def best(num_rows: int, num_columns: int, is_fused: bool, arch: int = 90) -> Build:
    """topk_kernel for k 2048 of rows that are not shared, alone or with slots."""
    sizes = search_for(2048, num_rows, num_columns, 132)
    assert isinstance(sizes, Search)
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


def shared_parts(arch: int = 90) -> Build:
    """topk_parts_kernel for k 2048."""
    sizes = shared()
    constants = {"CAP": sizes.cap, "SAMPLE": sizes.sample, "BLOCK": sizes.part, "PARTS": PARTS}
    constants |= {"CHUNK": 32 * sizes.part_warps, "IS_EARLY": arch >= 90}
    signature = {
        "scores_ptr": "*fp32",
        "count_ptr": "*i32",
        "scratch_ptr": "*i32",
        **dict.fromkeys(("num_columns", "scores_row", "scratch_row", "most_words"), "i32"),
        **dict.fromkeys(("region", "top"), "i32"),
        "target": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    launch = Tile(1, 1, 2, sizes.part_warps)
    return build("topk_parts_kernel", signature, constants, launch, arch, ("scores_row",))


def shared_settle(is_fused: bool, arch: int = 90) -> Build:
    """topk_settle_kernel for k 2048, alone with margins or with slots."""
    sizes = shared()
    constants = {"K": 2048, "CAP": sizes.cap, "BLOCK": sizes.block, "PART_BLOCK": sizes.part}
    constants |= {"CHUNK": sizes.chunk, "LIST": sizes.chunk, "PARTS": PARTS}
    constants |= {"PAGE": 64 if is_fused else 1, "LOOKS": not is_fused, "IS_EARLY": arch >= 90}
    left_out = ("margin_ptr",) if is_fused else ("slots_ptr", "pages_ptr", "request_ptr")
    signature = {
        "scores_ptr": "*fp32",
        "count_ptr": "*i32",
        "ids_ptr": "*i32",
        "slots_ptr": "*i64",
        "kept_ptr": "*i32",
        "margin_ptr": "*fp32",
        "nan_ptr": "*i1",
        **dict.fromkeys(("pages_ptr", "request_ptr", "scratch_ptr"), "*i32"),
        **dict.fromkeys(("num_columns", "num_pages", "scores_row", "ids_row"), "i32"),
        **dict.fromkeys(("slots_row", "pages_row", "num_parts", "scratch_row"), "i32"),
        **dict.fromkeys(("most_words", "region", "top"), "i32"),
        **dict.fromkeys((*constants, *left_out), "constexpr"),
    }
    launch = Tile(1, 1, 2, sizes.warps, sizes.registers)
    aligned = ("scores_row", "ids_row", "slots_row")
    given = constants | dict.fromkeys(left_out)
    return build("topk_settle_kernel", signature, given, launch, arch, aligned)


def shared() -> Split:
    sizes = search_for(2048, 1, 131_072, 132)
    assert isinstance(sizes, Split)
    return sizes


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
    if tile.registers is not None:
        is_same = arch == 90 or kernel.startswith("topk")
        options |= {"maxnreg": tile.registers if is_same else REGISTERS}
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
    "top-k of many short rows": (best(4096, 8192, True), ""),
    "top-k of many rows": (best(4096, 65_536, False), ""),
    "top-k of many long rows": (best(4096, 131_072, True), ""),
    "top-k of some rows": (best(64, 131_072, True), ""),
    "top-k of few rows, parts": (shared_parts(), ""),
    "top-k of few rows, settled": (shared_settle(True), ""),
    "top-k of few rows with margins": (shared_settle(False), ""),
}
OTHERS = [
    paged("fp8", 64, "decoded", arch=80),
    *(flat_codes(heads, arch) for heads in (16, 32, 64) for arch in (89, 120)),
    *(flat_codes(heads, arch, PAGED_TILES[CODE]) for heads in (32, 64) for arch in (89, 120)),
    *(paged("fp8", heads, "codes", arch) for heads in (32, 64) for arch in (89, 120)),
    flat("bf16", 64, arch=80),
    flat("fp32", 64, arch=80),
    paged("fp32", 64, "plain", arch=80),
    *(best(64, 65_536, True, arch) for arch in (80, 89, 120)),
    *(best(4096, 65_536, True, arch) for arch in (80, 89, 120)),
    *(shared_parts(arch) for arch in (80, 89, 120)),
    *(shared_settle(True, arch) for arch in (80, 89, 120)),
]


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    builds = [build for build, _ in BUILDS.values()]
    made = compile_all([*builds, *OTHERS])
    names = [*BUILDS, *(f"other {place}" for place in range(len(OTHERS)))]
    return dict(zip(names, made, strict=True))


def test_nothing_spills_and_everything_fits(reports: dict[str, Report]) -> None:
    built = [reports[name] for name in BUILDS]
    assert faults([one for one in built if not one.label.startswith("topk_kernel")]) == []


def test_other_gpus_run_them_as_well(reports: dict[str, Report]) -> None:
    others = [report for name, report in reports.items() if name.startswith("other")]
    whole = [report for report in others if not report.label.startswith("topk_kernel")]
    assert len(whole) == len(OTHERS) - 6
    assert faults(whole) == []


def test_the_top_k_keeps_to_its_registers(reports: dict[str, Report]) -> None:
    """What many programs at once allow: its loops fit, a few numbers do not (decisions/0012)."""
    for report in reports.values():
        if report.label.startswith("topk_kernel"):
            assert faults([replace(report, stack=0)]) == []
            assert report.registers <= 128, report
            assert report.stack <= 192, report


@pytest.mark.parametrize(
    ("capability", "most"),
    [((9, 0), TILES[CODE].registers), ((8, 9), REGISTERS), ((12, 0), REGISTERS)],
)
def test_what_the_gpu_says_about_registers(
    capability: tuple[int, int], most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher caps a kernel as the builds here are capped."""
    monkeypatch.setattr(index_views, "_capability", lambda device: capability)
    assert TILES[CODE].most_registers(torch.device("cuda")) == most
    assert PAGED_TILES[CODE].most_registers(torch.device("cuda")) is None


@pytest.mark.parametrize("name", [name for name, (_, shape) in BUILDS.items() if shape])
def test_dots_are_wgmma_of_the_whole_tile(reports: dict[str, Report], name: str) -> None:
    assert reports[name].wgmma == (BUILDS[name][1],)
