"""`gnomon bench ops`: what is timed is what the provider gave, failures stay in their cell."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gnomon.attention.dispatch import KernelSet, OpNeed, Requirement
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.spec import SPECS
from gnomon.bench import op_inputs, report
from gnomon.bench.ceilings import Ceilings, measure_ceilings
from gnomon.bench.op_cells import OpCell, op_cells
from gnomon.bench.ops import OpResult, ProviderTime, _flop_ceiling, bench_ops
from gnomon.bench.timing import Failure, Timing, time_calls
from gnomon.cli.bench import _chosen
from gnomon.errors import ConfigError
from tools.rank_providers import rows_of

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_bytes_s=1e9, matmul_flop_s=1e12, fp8_matmul_flop_s=None)
NORM = OpCell(
    "rms_norm", "8 x 16", partial(op_inputs.rms_norm, num_rows=8, width=16), OpNeed(),
    aims=(("torch", 0.5),),
)  # fmt: skip


def _broken(*_: object) -> None:
    raise RuntimeError("no luck\nsecond line")


def test_every_provider_of_a_cell_is_timed_refused_or_failed() -> None:
    cuda_only = Requirement(devices=frozenset({"cuda"}))
    others = (
        KernelSet("broken", 1, {"rms_norm": _broken}),
        KernelSet("elsewhere", 2, {"rms_norm": _broken}, cuda_only),
        KernelSet("without", 3, {}),
    )
    (result,) = bench_ops([NORM], [torch_provider.PROVIDER, *others], CEILINGS, num_runs=3)
    by_name = {entry.provider: entry for entry in result.times}
    assert set(by_name) == {"torch", "broken", "elsewhere"}
    assert by_name["torch"].timing is not None
    assert by_name["torch"].timing.num_runs == 3
    assert by_name["broken"].reason == "RuntimeError: no luck"
    assert "not on cpu" in by_name["elsewhere"].reason
    arguments = NORM.make(op_inputs.Material(CPU, torch.Generator(), torch.float32))
    assert result.min_bytes == SPECS["rms_norm"].min_bytes(arguments)


def test_calls_take_turns_and_a_failure_stops_nobody() -> None:
    order: list[str] = []
    calls = {name: partial(order.append, name) for name in "ab"} | {"bad": _broken}
    found = time_calls(calls, CPU, num_runs=2)
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b"]  # two runs each to warm up
    assert isinstance(found["bad"], Failure)
    assert isinstance(found["a"], Timing)


def test_a_run_that_fails_later_is_a_failure_of_its_call_alone() -> None:
    runs: list[int] = []

    def fails_in_the_fourth() -> None:
        runs.append(1)
        if len(runs) == 4:
            raise ValueError

    found = time_calls({"tires": fails_in_the_fourth, "a": lambda: None}, CPU, num_runs=5)
    assert found["tires"] == Failure("ValueError: ")
    assert len(runs) == 4  # it is not run again
    assert isinstance(found["a"], Timing)
    assert found["a"].num_runs == 5


def test_order_statistics() -> None:
    timing = Timing.of([float(n) for n in range(11, 0, -1)])
    assert (timing.median_us, timing.p10_us, timing.p90_us) == (6.0, 2.0, 10.0)


@pytest.mark.parametrize(("own", "word"), [(10.0, "reached"), (50.0, "MISSED")])
def test_a_ratio_is_the_anchors_time_over_ours(own: float, word: str) -> None:
    times = (
        ProviderTime("triton", Timing(own, own, own, 1), ""),
        ProviderTime("torch", Timing(20.0, 20.0, 20.0, 1), ""),
    )
    result = OpResult("rms_norm", "x", False, 1, 1, 1.0, times, (("torch", 0.5),))
    assert report.ratios(result, "triton") == {"torch": 20.0 / own}
    assert word in report.verdict(result, "triton")
    assert len(report.cell_lines(result)) == 2


def test_every_cpu_cell_runs_and_has_a_place_in_the_report(tmp_path) -> None:
    results = list(bench_ops(op_cells("cpu"), [torch_provider.PROVIDER], CEILINGS, num_runs=1))
    assert all(result.median("torch") is not None for result in results)
    whole = report.as_json(results, CEILINGS, {"machine": "test"})
    assert [cell["op"] for cell in whole["cells"]] == [cell.op for cell in op_cells("cpu")]
    report.draw(results, tmp_path / "ops.png", "test")
    assert (tmp_path / "ops.png").stat().st_size > 1000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_operator_has_a_cell_and_every_cell_a_name_of_its_own(device: str) -> None:
    cells = op_cells(device)
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.op for cell in cells} == set(SPECS)


@pytest.mark.parametrize("op", ["linear_fp8", "moe_fp8"])
def test_fp8_products_are_held_to_the_fp8_ceiling(op: str) -> None:
    cell = next(cell for cell in op_cells("cuda") if cell.op == op)
    assert _flop_ceiling(cell, Ceilings(1.0, 2.0, 3.0)) == 3.0
    assert _flop_ceiling(cell, Ceilings(1.0, 2.0, None)) == 2.0
    assert _flop_ceiling(NORM, Ceilings(1.0, 2.0, 3.0)) == 2.0


@pytest.mark.parametrize("cell", op_cells("cpu"), ids=lambda cell: cell.op)
def test_inputs_of_a_cell_give_numbers(cell: OpCell) -> None:
    arguments = cell.make(op_inputs.Material(CPU, torch.Generator().manual_seed(1), torch.float32))
    num_left = len(SPECS[cell.op].arguments) - len(arguments)  # top-k's margins, timed without
    arguments = (*arguments, *[True] * num_left)
    result = torch_provider.PROVIDER.kernel(cell.op, cell.need)(*arguments)
    observed = SPECS[cell.op].observe(arguments, result)
    assert all(bool(value.isfinite().any()) for value in observed.values())


PRODUCTS = [cell for cell in op_cells("cuda") if cell.op in ("linear_fp8", "moe_fp8")]


@pytest.mark.parametrize("cell", PRODUCTS, ids=lambda cell: cell.name)
def test_the_ranking_tool_reads_rows_and_phase_of_products(cell: OpCell) -> None:
    times = [{"provider": "triton", "timing": {"median_us": 1.0}}]
    (row,) = rows_of([{"op": cell.op, "size": cell.size, "times": times}])
    assert (row["phase"] == "decode") == cell.in_graph
    if cell.op == "linear_fp8":
        assert row["num_rows"] == cell.make.keywords["num_rows"]


def test_ceilings_are_positive() -> None:
    found = measure_ceilings(CPU)
    assert found.copy_bytes_s > 0
    assert found.matmul_flop_s > 0


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--only: nothing is called 'nope'.*rms_norm"):
        _chosen([NORM], "nope", "only", lambda cell: cell.name)
    assert _chosen([NORM], "", "only", lambda cell: cell.name) == (NORM,)


def test_a_gather_writes_values_wider_than_the_codes_that_it_reads():
    layout = Fp8LatentLayout(512, 64)
    pool = layout.allocate(2, 64)
    arguments = (pool, torch.tensor([1]), 0, 64)
    assert SPECS["context_gather"].min_bytes(arguments) == 64 * (656 + 2 * 576)
