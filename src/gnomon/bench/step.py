"""`gnomon bench step`: decode and prefill steps of a whole model, without scheduler and server.

In:  an engine's parts, cells (decode batch x context, prefill batch x length).
Out: StepResult per cell: time on the device, time of the host's work, kernels of one step by name,
     one layer of it by class.
Device time is between two events round the step, behind a spinning kernel that covers the host.
Host time is what building the batch and launching takes while the device is busy with the spin.
Not here: the steps' inputs (step_inputs.py), the display (step_report.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gnomon.bench.step_inputs import decode_schedule, pages_needed, prefill_schedules
from gnomon.bench.step_profile import CallProfile, KernelTime, LayerTime, profile_call
from gnomon.bench.timing import Timing, cover, device_events, time_calls
from gnomon.engine.assembly import Parts
from gnomon.engine.schedule_step import StepSchedule

DECODE_RUNS, PREFILL_RUNS = 15, 3
WARM_UP_STEPS, WARM_UP_GPU = 2, 20  # the first few after an idle GPU take up to 1 ms more


@dataclass(frozen=True, slots=True)
class StepCell:
    """``kind`` "decode": ``length`` tokens in the cache, this one included; "prefill": a prompt."""

    kind: str
    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Times of one cell in microseconds; ``reason`` says why there are none.

    ``head``: of the vocabulary's product alone, which ``device`` holds too.
    """

    cell: StepCell
    device: Timing | None = None
    host: Timing | None = None
    head: Timing | None = None
    kernels: tuple[KernelTime, ...] = ()
    layer: LayerTime | None = None
    reason: str = ""

    @property
    def num_launches(self) -> int:
        """Kernels, copies and fills that the device ran in one step."""
        return sum(kernel.count for kernel in self.kernels)


def bench_steps(
    parts: Parts, cells: Sequence[StepCell], max_tokens: int, with_profile: bool
) -> Iterator[StepResult]:
    """Time the cells one after another; ``max_tokens``: of one prefill step."""
    for cell in cells:
        yield _bench_cell(parts, cell, max_tokens, with_profile)
        if parts.cache.device.type == "cuda":
            torch.cuda.empty_cache()


def _why_not(parts: Parts, cell: StepCell) -> str:
    """Why the engine could not have such a step; empty if it could."""
    pool = next(iter(parts.cache.pools.values()))
    need = pages_needed(cell.batch, cell.length, pool.page_size)
    if need > pool.num_pages:
        return f"needs {need} cache pages, there are {pool.num_pages}"
    if cell.length > parts.info.max_model_len:
        return f"is longer than max_model_len = {parts.info.max_model_len}"
    seats = int(parts.info.resolved["max_num_seqs"][0])
    if cell.batch > seats:
        return f"has more requests than max_num_seqs = {seats}"
    return ""


def _bench_cell(parts: Parts, cell: StepCell, max_tokens: int, with_profile: bool) -> StepResult:
    pool = next(iter(parts.cache.pools.values()))
    if why := _why_not(parts, cell):
        return StepResult(cell, reason=why)
    if cell.kind == "decode":
        steps = [decode_schedule(cell.batch, cell.length, pool.page_size, 0)]
    else:
        steps = prefill_schedules(cell.batch, cell.length, pool.page_size, max_tokens)
    runs = DECODE_RUNS if cell.kind == "decode" else PREFILL_RUNS
    device = parts.cache.device
    warm_up = WARM_UP_GPU if device.type == "cuda" else WARM_UP_STEPS
    for _ in range(warm_up if cell.kind == "decode" else 1):
        _run(parts, steps)
    _wait(device)
    device_us, host_us = [], []
    for _ in range(runs):
        taken = _timed(parts, steps, device)
        device_us.append(taken[0])
        host_us.append(taken[1])
    head = _time_head(parts, cell.batch, device)
    profiled = CallProfile()
    if with_profile and device.type == "cuda":
        profiled = profile_call(lambda: _run(parts, steps), device)
    for item in (item for step in steps for item in step.items):
        parts.builder.drop(item.request_id)
    times = Timing.of(device_us), Timing.of(host_us), head
    return StepResult(cell, *times, profiled.kernels, profiled.layer)


def _time_head(parts: Parts, num_rows: int, device: torch.device) -> Timing | None:
    model = parts.runner.model
    hidden = torch.zeros(
        num_rows, model.config.hidden_size, dtype=model.embedding.dtype, device=device
    )
    taken = time_calls({"head": lambda: parts.runner.logits(hidden)}, device, num_runs=5)["head"]
    return taken if isinstance(taken, Timing) else None


def _run(parts: Parts, steps: Sequence[StepSchedule]) -> None:
    for schedule in steps:
        batch = parts.builder.build(schedule)
        output = parts.runner.run(batch)
        parts.sampler.launch(output.logits, batch.samples)
    for item in steps[-1].items:
        parts.sampler.drop(item.request_id)


def _timed(
    parts: Parts, steps: Sequence[StepSchedule], device: torch.device
) -> tuple[float, float]:
    """(device, host) microseconds; on a CPU they are one."""
    if device.type != "cuda":
        begin = time.perf_counter()
        _run(parts, steps)
        taken = (time.perf_counter() - begin) * 1e6
        return taken, taken
    first, last = device_events()
    cover()
    first.record()
    begin = time.perf_counter()
    _run(parts, steps)
    host = (time.perf_counter() - begin) * 1e6
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) * 1000, host


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
