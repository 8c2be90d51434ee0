"""Rotations of rows in one launch, under the interpreter, against the table's own look-up."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.axes import RowAxis
from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.geometry import build_geometry
from gnomon.attention.ops.fusions import rope_rows
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import RopeTable
from gnomon.attention.providers.triton import PROVIDER
from tests.unit.triton.ahead_of_time import Build, compile_all, faults


def axis(num_rows: int) -> RowAxis:
    pages = [list(range(1, 30))]
    return build_geometry([num_rows], [90], {"tokens": pages}, page_size=4).rows


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 8])
@pytest.mark.parametrize("half", [0, 4, 12, 32])
def test_as_the_table_has_them(num_rows: int, is_interleaved: bool, half: int) -> None:
    angles = torch.randn(100, half)
    table, rows = RopeTable(angles.cos(), angles.sin()), axis(num_rows)
    ops = bind_operators(OpNeed(), [PROVIDER], "triton")[0]
    assert "rope_rows" in ops.fusions
    found, expected = rope_rows(ops, table, rows, is_interleaved), table.at(rows, is_interleaved)
    assert torch.equal(found.cos, expected.cos)
    assert torch.equal(found.sin, expected.sin)
    assert found.axis is rows
    assert found.is_interleaved is is_interleaved


def test_fp64_and_other_providers_look_them_up() -> None:
    angles = torch.randn(100, 4, dtype=torch.float64)
    table, rows = RopeTable(angles.cos(), angles.sin()), axis(3)
    for ops in (bind_operators(OpNeed(), [PROVIDER], "triton")[0], Operators(PROVIDER.kernels)):
        assert torch.equal(rope_rows(ops, table, rows, True).sin, table.at(rows, True).sin)


def test_it_compiles() -> None:
    constants = {"DIM": 64, "BLOCK": 64, "ROWS": 4, "IS_INTERLEAVED": False}
    signature = dict.fromkeys(("cos", "sin"), "*fp32") | {"position": "*i32"}
    signature |= dict.fromkeys(("cos_out", "sin_out"), "*fp32") | {"num_rows": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    module = "gnomon.attention.providers.triton.rope_rows"
    builds = [
        Build(module, "rope_rows_kernel", signature, constants, {"num_warps": 1}, arch)
        for arch in (90, 80)
    ]
    assert not faults(compile_all(builds))
