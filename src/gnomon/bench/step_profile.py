"""Which kernels a call runs on the device, how often and for how long.

In:  a callable. Out: KernelTimes, the dearest first. CUDA only.
Not here: what is called (step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All runs of one kernel within a call: how many, microseconds in sum."""

    name: str
    count: int
    total_us: float


def profile_call(call: Callable[[], object], device: torch.device) -> tuple[KernelTime, ...]:
    """Kernels, copies and fills of one call."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        call()
        torch.cuda.synchronize(device)
    counts: dict[str, int] = {}
    totals: dict[str, float] = {}
    for event in watched.events():
        if event.device_type.name == "CUDA":
            counts[event.name] = counts.get(event.name, 0) + 1
            totals[event.name] = totals.get(event.name, 0.0) + float(event.device_time)
    ordered = sorted(totals, key=lambda name: -totals[name])
    return tuple(KernelTime(name, counts[name], totals[name]) for name in ordered)
