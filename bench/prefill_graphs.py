"""Prefill steps with and without captured parts, in one process: what graphs are worth by rows.

In:  --cells BxL[@C],... (prompts x tokens, of which C are in the cache already), then engine flags.
     Needs a GPU; half a minute when the kernel cache is warm.
Out: time and memory of the captures; then per step: rows, bucket, and eagerly and captured: wall
     time (build, run, sample and wait; median of 9, in turns), host time (launching alone), time on
     the device (behind a spinning kernel that covers the launches), launches that the host makes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gnomon.bench.step_inputs import fill_cache, prefill_schedules
from gnomon.bench.timing import cover, device_events
from gnomon.engine.assembly import Parts, assemble
from gnomon.engine.batch import Batch
from gnomon.engine.config import EngineConfig
from gnomon.engine.schedule_step import StepSchedule

RUNS = 9
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "Memset")
Times = tuple[float, float, float]  # wall, host, device in milliseconds


def stepper(parts: Parts, schedule: StepSchedule, is_eager: bool) -> Callable[[], None]:
    def step() -> None:
        batch = parts.builder.build(schedule)
        assert isinstance(batch, Batch)
        ops = parts.runner.operators(batch.plan) if is_eager else None
        output = parts.runner.run(batch, ops=ops)
        parts.sampler.launch(output.logits, batch.samples)

    return step


def timed(step: Callable[[], None]) -> Times:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    wall = time.perf_counter() - begin
    first, last = device_events()
    cover()
    first.record()
    step()
    last.record()
    torch.cuda.synchronize()
    return wall * 1000, host * 1000, first.elapsed_time(last)


def launches(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        step()
        torch.cuda.synchronize()
    return sum(event.name.startswith(LAUNCHES) for event in watched.events())


def bench_cell(parts: Parts, cell: str, page_size: int, most: int) -> dict[str, Any]:
    size, _, cached = cell.partition("@")
    batch, length = map(int, size.split("x"))
    skipped = int(cached or 0)
    # The last of the steps that prefill the prompts is the one with a context before it.
    schedules = prefill_schedules(batch, length + skipped, page_size, skipped or most)
    schedule = schedules[-1]
    rows, prefill = schedule.num_tokens, parts.runner._prefill
    bucket = prefill.bucket_of(rows) if prefill is not None else None
    ways = {"eager": stepper(parts, schedule, True), "graph": stepper(parts, schedule, False)}
    times: dict[str, list[Times]] = {name: [] for name in ways}
    for step in ways.values():
        step()
        step()
    for _ in range(RUNS):
        for name, step in ways.items():
            times[name].append(timed(step))
    found: dict[str, Any] = {"cell": cell, "rows": rows, "bucket": bucket}
    for name, step in ways.items():
        wall, host, device = (statistics.median(one) for one in zip(*times[name], strict=True))
        found[name] = {"wall": wall, "host": host, "device": device, "launches": launches(step)}
    for item in schedule.items:
        parts.builder.drop(item.request_id)
        parts.sampler.drop(item.request_id)
    return found


def shown(times: Any) -> str:
    return "{wall:7.2f} {host:7.2f} {device:7.2f} {launches:5d}".format(**times)


def main(cells: list[str], flags: dict[str, str]) -> None:
    given: dict[str, Any] = {}
    for name, text in flags.items():
        given[name] = int(text) if text.isdigit() else text
    stages: dict[str, float] = {}
    begin = time.perf_counter()
    free = torch.cuda.mem_get_info()[0]

    def progress(stage: str, done: int, total: int) -> None:
        stages[stage] = time.perf_counter() - begin
        if done == total:
            print(f"{stages[stage]:7.2f} s  {stage} done ({total})", flush=True)

    parts = assemble(EngineConfig.of(**given), progress)
    fill_cache(parts.cache, 0)
    taken = (free - torch.cuda.mem_get_info()[0]) >> 20
    print(f"{flags}: {taken} MiB taken, {torch.cuda.memory_reserved() >> 20} MiB reserved by torch")
    most, page_size = parts.scheduler.config.max_num_batched_tokens, parts.builder.rules.page_size
    title = "eager wall / host / device ms, launches | graph wall / host / device ms, launches"
    print(f"{'cell':<12}{'rows':>6}{'bucket':>7}  {title}", flush=True)
    results = []
    for cell in cells:
        one = bench_cell(parts, cell, page_size, most)
        results.append(one)
        text = f"{shown(one['eager'])} | {shown(one['graph'])}"
        print(f"{cell:<12}{one['rows']:>6}{one['bucket'] or '-':>7}  {text}", flush=True)
    print(json.dumps({"flags": flags, "cells": results}))


if __name__ == "__main__":
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    named = {name.removeprefix("--").replace("-", "_"): text for name, text in options.items()}
    main(named.pop("cells").split(","), named)
