"""`gnomon bench ops`: every operator at its sizes through every provider, taking turns.

In:  cells, providers. Out: OpResult per cell: each provider's time, rates, shares of the ceilings,
     ratios to the aims' anchors; providers that refuse or fail are listed with their reason.
FLOPs and least bytes are the spec's own (spec.SPECS), so that all providers are judged alike.
Not here: the cells (op_cells.py), the clock (timing.py), the display (report.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gnomon.attention.dispatch import Provider
from gnomon.attention.spec import SPECS
from gnomon.bench.ceilings import Ceilings
from gnomon.bench.op_cells import OpCell
from gnomon.bench.op_inputs import Material
from gnomon.bench.timing import Failure, Timing, time_calls

SEED = 20261129
SLOW = frozenset({"reference"})  # loops that take minutes at these sizes


@dataclass(frozen=True, slots=True)
class ProviderTime:
    """One provider in one cell. Rates from the spec's FLOPs and least bytes."""

    provider: str
    timing: Timing | None
    reason: str
    flop_s: float = 0.0
    bytes_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OpResult:
    """A cell with all its times. ``floor_us``: the longer of FLOPs and bytes at the ceilings."""

    op: str
    size: str
    is_graph: bool
    flops: int
    min_bytes: int
    floor_us: float
    times: tuple[ProviderTime, ...]
    aims: tuple[tuple[str, float], ...]

    def median(self, provider: str) -> float | None:
        """Microseconds of a provider, None where it has no time."""
        for entry in self.times:
            if entry.provider == provider and entry.timing is not None:
                return entry.timing.median_us
        return None


def bench_ops(
    cells: Sequence[OpCell],
    providers: Sequence[Provider],
    ceilings: Ceilings,
    num_runs: int = 20,
    on_cell: Callable[[OpCell], None] = lambda cell: None,
) -> Iterator[OpResult]:
    """Time the cells one after another; ``on_cell`` hears of each before it starts."""
    for cell in cells:
        on_cell(cell)
        yield _bench_cell(cell, providers, ceilings, num_runs)
        gc.collect()
        if cell.need.device == "cuda":
            torch.cuda.empty_cache()


def _bench_cell(
    cell: OpCell, providers: Sequence[Provider], ceilings: Ceilings, num_runs: int
) -> OpResult:
    device = torch.device(cell.need.device)
    generator = torch.Generator(device).manual_seed(SEED)
    arguments = cell.make(Material(device, generator, cell.need.dtype))
    need = replace(cell.need, is_graph=cell.in_graph)
    refused: dict[str, str] = {}
    calls = {}
    for provider in providers:
        if provider.name in SLOW:
            continue
        verdict = provider.supports(cell.op, need)
        if verdict.is_ok:
            kernel = provider.kernel(cell.op, need)
            calls[provider.name] = lambda kernel=kernel: kernel(*arguments)
        elif verdict.has_kernel:
            refused[provider.name] = verdict.reason
    spec = SPECS[cell.op]
    flops, least = spec.flops(arguments), spec.min_bytes(arguments)
    found = time_calls(calls, device, num_runs, cell.in_graph)
    times = [ProviderTime(name, None, reason) for name, reason in refused.items()]
    for name, outcome in found.items():
        if isinstance(outcome, Failure):
            times.append(ProviderTime(name, None, outcome.reason))
        else:
            seconds = outcome.median_us * 1e-6
            times.append(ProviderTime(name, outcome, "", flops / seconds, least / seconds))
    times.sort(key=lambda entry: entry.timing.median_us if entry.timing else float("inf"))
    floor = max(flops / _flop_ceiling(cell, ceilings), least / ceilings.copy_bytes_s) * 1e6
    return OpResult(cell.op, cell.size, cell.in_graph, flops, least, floor, tuple(times), cell.aims)


def _flop_ceiling(cell: OpCell, ceilings: Ceilings) -> float:
    """FP8 products for FP8 weights and scores over FP8 index keys, else the compute dtype's."""
    is_fp8 = cell.op.startswith("index_scores") and cell.need.index_layout == "index_k_132"
    is_fp8 |= cell.op in ("linear_fp8", "moe_fp8")
    if is_fp8 and ceilings.fp8_matmul_flop_s:
        return ceilings.fp8_matmul_flop_s
    return ceilings.matmul_flop_s
