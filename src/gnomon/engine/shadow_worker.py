"""The shadow's process: recordings in, verdicts of the reference out, at the lowest priority.

In:  on standard input, again and again: 8 bytes of length (little-endian), then a recording.
Out: on standard output, one line of JSON for each: by operator [cases, differing, worst difference,
     worst share of what is allowed]; how many calls the time did not suffice for; the first
     difference in words. End of input ends the process.
Calls start at another place in every step, so that a short budget reaches all of them in time.
Not here: who sends and who counts (shadow.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any, BinaryIO

import torch

from gnomon.attention.providers import reference
from gnomon.attention.recording_file import from_bytes
from gnomon.attention.recording_replay import CallReport, replay_some
from gnomon.attention.recording_report import describe

LOWEST_PRIORITY = 19
STRIDE = 7919  # a prime, so that starting places spread over the calls


def main(budget_s: float) -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine; our input then ends
    os.nice(LOWEST_PRIORITY)
    torch.set_num_threads(1)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(BrokenPipeError):  # the engine has gone
        while (data := _next(source)) is not None:
            target.write(json.dumps(_answer(data, budget_s)).encode() + b"\n")
            target.flush()


def _answer(data: bytes, budget_s: float) -> dict[str, Any]:
    try:
        return judge(data, budget_s)
    except Exception as error:  # one bad recording must not end the process
        return {"error": f"{type(error).__name__}: {error}"}


def judge(data: bytes, budget_s: float) -> dict[str, Any]:
    """The verdict on one recording; at most ``budget_s`` seconds and one call."""
    recording = from_bytes(data, "a shadowed step")
    num_calls = len(recording.calls)
    step_id = 0 if recording.step is None else recording.step.step_id
    start = step_id * STRIDE % max(num_calls, 1)
    numbers = [(start + place) % num_calls for place in range(num_calls)]
    deadline = time.monotonic() + budget_s
    operators: dict[str, list[float]] = {}
    first, num_done = "", 0
    for report in replay_some(recording, reference.PROVIDER, numbers):
        num_done += 1
        _add(operators, report)
        if not report.is_ok and not first:
            first = f"step {step_id}: {describe(report, recording)}"
        if time.monotonic() > deadline:
            break
    return {"operators": operators, "late": num_calls - num_done, "first": first}


def _add(operators: dict[str, list[float]], report: CallReport) -> None:
    if report.skipped:
        return
    found = operators.setdefault(report.op, [0, 0, 0.0, 0.0])
    found[0] += 1
    found[1] += not report.is_ok
    found[2] = max(found[2], report.comparison.worst)
    found[3] = max(found[3], report.comparison.share)


def _next(source: BinaryIO) -> bytes | None:
    length = source.read(8)
    if len(length) < 8:
        return None
    return source.read(int.from_bytes(length, "little"))
