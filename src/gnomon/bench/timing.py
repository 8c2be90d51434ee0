"""Times of several calls of the same work, interleaved in one process.

In:  named callables, a device.
Out: a Timing for each: median, p10 and p90 of single runs, in microseconds.
Only figures of one run compare: a GPU's clock follows its heat, so the calls take turns. On CUDA
the L2 cache is overwritten before each run and a spinning kernel covers the host's launches, so
that what is timed is the device's work; in a captured graph there are no launches to cover.
Not here: what is called (op_inputs.py), tables (report.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20  # five times an H200's L2
COVER_CYCLES = 1_500_000  # about 0.8 ms of spinning: longer than a provider takes to launch
WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call on the device, over ``num_runs`` runs."""

    median_us: float
    p10_us: float
    p90_us: float
    num_runs: int

    @classmethod
    def of(cls, samples_us: list[float]) -> Timing:
        """Order statistics of the samples (at least one)."""
        ordered = sorted(samples_us)
        last = len(ordered) - 1
        at = [ordered[round(share * last)] for share in (0.5, 0.1, 0.9)]
        return cls(at[0], at[1], at[2], len(ordered))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call could not be timed."""

    reason: str


def time_calls(
    calls: Mapping[str, Call],
    device: torch.device,
    num_runs: int = 20,
    in_graph: bool = False,
) -> dict[str, Timing | Failure]:
    """Times of every call, taking turns. One that raises gets a Failure; the others go on.

    ``in_graph`` (CUDA): each call is captured once and its replay is timed; a call that cannot be
    captured is a Failure.
    """
    found: dict[str, Timing | Failure] = {}
    ready: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            ready[name] = _prepared(call, device, in_graph)
        except Exception as error:  # a provider's own words are the result of this cell
            found[name] = _failure(error)
    run = _timed_on_device(device) if device.type == "cuda" else _timed_on_host
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(num_runs):
        for name, call in ready.items():
            if name not in found:
                try:
                    samples[name].append(run(call))
                except Exception as error:  # as above: one run in twenty may fail
                    found[name] = _failure(error)
    return {name: found.get(name) or Timing.of(samples[name]) for name in calls}


def _failure(error: Exception) -> Failure:
    lines = str(error).splitlines() or [""]
    return Failure(f"{type(error).__name__}: {lines[0][:200]}")


def _prepared(call: Call, device: torch.device, in_graph: bool) -> Call:
    for _ in range(WARM_UP_RUNS):
        call()
    if device.type != "cuda":
        return call
    torch.cuda.synchronize(device)
    if not in_graph:
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    torch.cuda.synchronize(device)
    return graph.replay


def _timed_on_device(device: torch.device) -> Callable[[Call], float]:
    """Runs a call behind an overwritten L2 cache and tells its microseconds on the device."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def timed(call: Call) -> float:
        begin, end = device_events()
        flush.zero_()
        cover()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) * 1000

    return timed


def _timed_on_host(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def cover() -> None:
    """Keep the device busy for a while, so that what the host launches next waits in line."""
    torch.cuda._sleep(COVER_CYCLES)  # type: ignore[no-untyped-call]  # torch has no types here


def device_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events that take the time between them."""
    return _event(), _event()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # nor here
