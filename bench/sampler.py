"""Time of the sampler's launch by kind of request: device, host, and kernels it takes.

In:  a GPU; `--rows`, `--tokens` (the vocabulary).
Out: a table on stdout: for each kind microseconds of the device and of the host, kernels launched.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampler import Sampler, SampleRow
from gnomon.engine.sampling_params import SamplingParams

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "0.6, top-p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "frequency penalty": {"temperature": 0.0, "frequency_penalty": 0.5},
}
SPREADS = {"peaked": 6.0, "flat": 0.5}  # standard deviation of the logits
REPEATS = 20


def row_of(number: int, fields: dict[str, float]) -> SampleRow:
    """One request of a kind."""
    params = SamplingParams(**fields)  # type: ignore[arg-type]  # top_k is an int
    request = EngineRequest(request_id=str(number), prompt_token_ids=[1, 2], params=params)
    return SampleRow(request, 5)


def measured(logits: torch.Tensor, rows: list[SampleRow]) -> tuple[float, float, float, int]:
    """(us of the kernels, us from one launch to the next, host us, kernels) of one launch."""
    sampler = Sampler(0)
    for _ in range(3):
        sampler.launch(logits, rows)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    for _ in range(REPEATS):
        sampler.launch(logits, rows)
    end.record()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        sampler.launch(logits, rows)
        torch.cuda.synchronize()
    events = [event for event in traced.events() if event.device_type.name == "CUDA"]
    device = sum(event.device_time_total for event in events)
    spent = start.elapsed_time(end) * 1e3 / REPEATS
    return device, spent, host / REPEATS * 1e6, len(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=129_280)
    given = parser.parse_args()
    for name, spread in SPREADS.items():
        logits = torch.randn(given.rows, given.tokens, device="cuda") * spread
        for kind, fields in KINDS.items():
            rows = [row_of(number, fields) for number in range(given.rows)]
            device, host, count = measured(logits, rows)
            print(
                f"{name:8} {kind:20} device {device:8.1f} us, host {host:7.1f} us, {count} kernels"
            )


if __name__ == "__main__":
    main()
