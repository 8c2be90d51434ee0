"""The launches of the external adapters at real widths, compiled for sm_90 and sm_80."""

from __future__ import annotations

import pytest

from gnomon.attention.providers.external import launches
from tests.unit.triton.ahead_of_time import Build, compile_all, faults

KINDS = {
    **dict.fromkeys(("x", "weights", "latent", "rope", "query", "out"), "*bf16"),
    **{"place": "*i64", "ids": "*i64", "mixed": "*bf16"},
    **{"pages": "*i32", "request": "*i32", "tables": "*i32"},
    **{"codes": "*u8", "scales": "*fp32", "scores": "*fp32", "lse": "*fp32"},
    **{"slots": "*i64", "lists": "*i32", "count": "*i32", "visible": "*i32", "factor": "fp32"},
}
CONSTANTS = {
    "_encode": {
        **{"H": 64, "D": 128, "DP": 128, "BR": launches.ROWS},
        **{"HAS_WEIGHTS": True, "NATIVE": True},
    },
    "_pack": {
        **{"H": 16, "HP": 64, "DC": 512, "DR": 64, "DCP": 512, "DRP": 64, "BH": launches.HEADS},
        **{"HELD": 2048, "BLOCK": launches.TAIL},
    },
    "_lists": {"HELD": 2048, "BLOCK": launches.TAIL},
    "_hide": {"BLOCK": launches.TAIL},
    "_tables": {"PAGE": 64, "BLOCK": launches.PAGES},
    "_mix": {"K": 8, "BLOCK": launches.TAIL},
    "_clear": {"H": 128, "HP": 128, "WIDTH": 128 * 128, "BLOCK": launches.TAIL},
}


def build(name: str, arch: int) -> Build:
    constants = dict(CONSTANTS[name])
    if name == "_encode":
        constants["NATIVE"] = arch >= 89
    names = getattr(launches, name).arg_names
    signature = {n: "constexpr" if n in constants else KINDS.get(n, "i32") for n in names}
    return Build(launches.__name__, name, signature, constants, arch=arch)


@pytest.mark.parametrize("arch", [90, 80])
def test_launches_compile(arch: int) -> None:
    reports = compile_all([build(name, arch) for name in CONSTANTS])
    assert len(reports) == len(CONSTANTS)
    assert not faults(reports)
