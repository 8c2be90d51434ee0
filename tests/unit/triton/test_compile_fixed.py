"""Products with fixed bits at real widths, compiled for sm_90 (80, 89, 120 once)."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.providers.triton.fixed import choose_fixed_tile
from tests.unit.triton.ahead_of_time import Build, Report, compile_all, faults

STRIDES = ("x_row", "x_head", "w_head", "out_part", "out_row", "out_head")
OLDEST_SHARED = 101_376  # bytes that a block may have on sm_89 and sm_120


def product(num_columns: int, depth: int, is_narrow: bool, is_by_head: bool, arch: int) -> Build:
    """A weight [N, K], or heads' [H, K, N], which has its columns side by side."""
    tile = choose_fixed_tile(num_columns, depth, torch.bfloat16, arch == 90, is_narrow)
    constants = {
        ("w_n" if is_by_head else "w_k"): 1,
        **{"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "PARTS": tile.parts},
        **{"GROUP_M": 8, "EVEN_N": True, "EVEN_K": True, "STAGES": tile.stages},
    }
    sizes = ("num_rows", "N", "K", *STRIDES[:3], "w_k", "w_n", *STRIDES[3:])
    signature = {
        **dict.fromkeys(("x", "weight", "out"), "*bf16"),
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    signature["out"] = "*fp32" if tile.parts > 1 else "*bf16"
    aligned = ("x", "weight", "out", "N", "K", *STRIDES, "w_k" if is_by_head else "w_n")
    module = "gnomon.attention.providers.triton.fixed"
    return Build(module, "multiply_fixed", signature, constants, {"num_warps": 4}, arch, aligned)


BUILDS = [
    product(128, 7168, is_narrow=True, is_by_head=False, arch=90),
    product(129_280, 7168, is_narrow=False, is_by_head=False, arch=90),
    product(512, 128, is_narrow=False, is_by_head=True, arch=90),
    product(128, 512, is_narrow=False, is_by_head=False, arch=90),
    *(product(4096, 4096, is_narrow=False, is_by_head=False, arch=arch) for arch in (80, 89, 120)),
]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_all(BUILDS)


def test_no_kernel_spills_or_asks_for_too_much(reports: list[Report]) -> None:
    assert faults(reports) == []
    assert max(report.shared for report in reports[4:]) <= OLDEST_SHARED


def test_they_run_on_wgmma_of_one_shape_a_width(reports: list[Report]) -> None:
    assert reports[0].wgmma == ("m64n64k16",)
    for report in reports[1:4]:
        assert report.wgmma == ("m64n128k16",), report.label
