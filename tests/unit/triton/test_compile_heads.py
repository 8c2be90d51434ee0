"""Products by head in FP8 at real widths, compiled for sm_90 (80, 89, 120 once)."""

from __future__ import annotations

import pytest

from tests.unit.triton.ahead_of_time import Build, Report, compile_all, faults

STRIDES = ("x_row", "x_head", "w_head", "w_n", "c_row")
OLDEST_SHARED = 101_376  # bytes that a block may have on sm_89 and sm_120


def product(width: int, rows: int, arch: int, stages: int) -> Build:
    """W_UV of heads of ``width``, K contiguous."""
    constants = {
        **{"w_k": 1, "N": width, "BM": rows, "BK": 64, "SWAP": rows < 64, "EVEN_K": True},
        **{"IS_POWER_OF_TWO": False, "NATIVE": arch >= 89, "STAGES": stages},
    }
    names = ("num_rows", "K", "x_row", "x_head", "w_head", "w_k", "w_n", "c_row", "s_group")
    signature = {
        **{"x": "*bf16", "weight": "*bf16", "codes": "*u8", "scales": "*fp32"},
        **dict.fromkeys(names, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = ("x", "weight", "codes", "scales", "K", *STRIDES)
    options = {"num_warps": 4 if arch == 90 else 8}
    module = "gnomon.attention.providers.triton.heads"
    return Build(module, "multiply_heads_quantise", signature, constants, options, arch, aligned)


BUILDS = [
    product(128, 16, 90, 6),
    product(128, 32, 90, 6),
    product(256, 64, 90, 4),
    *(product(128, 16, arch, 4) for arch in (80, 89, 120)),
]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_all(BUILDS)


def test_no_kernel_spills_or_asks_for_too_much(reports: list[Report]) -> None:
    assert faults(reports) == []
    assert max(report.shared for report in reports[3:]) <= OLDEST_SHARED


def test_they_run_on_wgmma(reports: list[Report]) -> None:
    assert [report.wgmma for report in reports[:3]] == [
        ("m64n16k16",),
        ("m64n32k16",),
        ("m64n128k16",),
    ]
