"""Narrow products at real widths, compiled for sm_90 (80, 89, 120 once)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.triton.ahead_of_time import Build, Report, compile_all, faults

MODULE = "gnomon.attention.providers.triton.narrow"
ROWS = ("x_row", "first_row", "second_row")
OLDEST_SHARED = 101_376  # bytes that a block may have on sm_89 and sm_120


def product(rows: int, arch: int, has_first: bool = True, parts: int = 1) -> Build:
    """An indexer's wk and head weights, or a router."""
    stages = 6 if arch == 90 else 3
    constants = {
        **{"BM": rows, "BN": 64, "BK": 64, "PARTS": parts, "SPLITS": 16, "HAS_FIRST": has_first},
        **{"SWAP": rows < 64, "EVEN_K": True, "STAGES": stages, "IS_EARLY": arch >= 90},
    }
    signature = {
        **dict.fromkeys(("x", "first", "second"), "*bf16"),
        "sums": "*fp32",
        **dict.fromkeys(("num_rows", "N1", "N2", "K", *ROWS), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = ("x", "first", "second", "sums", "N1", "N2", "K", *ROWS)
    return Build(MODULE, "multiply_narrow", signature, constants, {"num_warps": 4}, arch, aligned)


def one_output(build: Build) -> Build:
    """The same for a second weight of one row: Triton hands a 1 over as a constant."""
    constants = {**build.constants, "N2": 1}
    aligned = tuple(name for name in build.aligned or () if name != "N2")
    return replace(
        build,
        constants=constants,
        signature={**build.signature, "N2": "constexpr"},
        aligned=aligned,
    )


def addition(arch: int, first: str = "*bf16") -> Build:
    """``first``: fp32 where there is none and the second stands in for it."""
    constants = {"SPLITS": 16, "BLOCK": 256, "IS_EARLY": arch >= 90}
    signature = {
        **{"sums": "*fp32", "first": first, "second": "*fp32"},
        **dict.fromkeys(("num_rows", "N1", "N2"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = ("sums", "first", "second", "N1", "N2")
    return Build(MODULE, "add_narrow", signature, constants, {"num_warps": 4}, arch, aligned)


BUILDS = [
    product(16, 90),
    product(64, 90),
    product(64, 90, has_first=False, parts=3),
    addition(90),
    *(product(16, arch) for arch in (80, 89, 120)),
    one_output(product(16, 90)),
    addition(90, first="*fp32"),
]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_all(BUILDS)


def test_no_kernel_spills_or_asks_for_too_much(reports: list[Report]) -> None:
    assert faults(reports) == []
    assert max(report.shared for report in reports[4:]) <= OLDEST_SHARED


def test_they_run_on_wgmma(reports: list[Report]) -> None:
    assert [report.wgmma for report in reports[:3]] == [
        ("m64n16k16",),
        ("m64n64k16",),
        ("m64n64k16",),
    ]
