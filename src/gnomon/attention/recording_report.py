"""What a replay found, for people (one sentence, one table) and for programs (plain values).

In:  a ReplayReport and the recording it is of.
Out: strings, and dicts that JSON can hold (numbers that are not finite become None).
Not here: where it is printed (cli/replay.py), the comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gnomon.attention.recording import Recording
from gnomon.attention.recording_compare import Difference, tolerance_of
from gnomon.attention.recording_replay import CallReport, ReplayReport


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """All calls of one operator: how many were run, equal to the bit, wrong; the worst of them."""

    op: str
    num_calls: int
    num_run: int
    num_equal: int
    num_differing: int
    worst: float
    share: float


def by_operator(report: ReplayReport) -> list[OperatorSummary]:
    """One summary per operator, in the order of their first calls."""
    found = []
    for op in dict.fromkeys(call.op for call in report.calls):
        calls = [call for call in report.calls if call.op == op]
        run = [call for call in calls if not call.skipped]
        found.append(
            OperatorSummary(
                op=op,
                num_calls=len(calls),
                num_run=len(run),
                num_equal=sum(call.comparison.is_equal for call in run),
                num_differing=sum(not call.is_ok for call in run),
                worst=max((call.comparison.worst for call in run), default=0.0),
                share=max((call.comparison.share for call in run), default=0.0),
            )
        )
    return found


def describe(call: CallReport, recording: Recording) -> str:
    """One sentence on a call that differs: operator, layer, row, head, numbers, tolerance."""
    found = call.comparison.first
    layer = "outside the layers" if call.layer is None else f"layer {call.layer}"
    words = [f"{call.op}, {layer}"]
    if found is None:
        return f"{words[0]} (call {call.number}): equal within the tolerance"
    words += _place(found, recording)
    what = found.note
    if not what:
        place = f"{found.name}[{', '.join(map(str, found.index))}]"
        what = (
            f"{place} is {found.found:.9g}, recorded is {found.expected:.9g}; they differ by "
            f"{found.difference:.3g}, allowed is {found.allowed:.3g}"
        )
        tolerance = tolerance_of(recording.calls[call.number], found.name)
        what += f" ({tolerance.reason})"
    return f"{', '.join(words)} (call {call.number}): {what}"


def as_json(report: ReplayReport, recording: Recording) -> dict[str, Any]:
    """Everything that a program may want to know."""
    first = report.first
    return {
        "provider": report.provider,
        "recorded": {
            "origin": dict(recording.origin),
            "providers": dict(recording.providers),
            "step_id": None if recording.step is None else recording.step.step_id,
            "reason": recording.reason,
            "error": recording.error,
            "is_redacted": recording.is_redacted,
        },
        "geometry_fault": report.geometry_fault,
        "is_equal": first is None,
        "num_calls": len(report.calls),
        "num_run": report.num_run,
        "skipped": report.skipped,
        "operators": {
            one.op: {
                "calls": one.num_calls,
                "run": one.num_run,
                "equal_to_the_bit": one.num_equal,
                "differing": one.num_differing,
                "worst_difference": _finite(one.worst),
                "worst_share_of_tolerance": _finite(one.share),
            }
            for one in by_operator(report)
        },
        "first": None if first is None else _first_json(first, recording),
    }


def _first_json(call: CallReport, recording: Recording) -> dict[str, Any]:
    found = call.comparison.first or Difference("")
    request, position = _request_of(found, recording)
    return {
        "call": call.number,
        "operator": call.op,
        "layer": call.layer,
        "part": call.part,
        "result": found.name,
        "index": list(found.index),
        "row": found.row,
        "step_row": found.step_row,
        "request": request,
        "position": position,
        "head": found.head,
        "recorded": _finite(found.expected),
        "found": _finite(found.found),
        "difference": _finite(found.difference),
        "allowed": _finite(found.allowed),
        "note": found.note,
        "recorded_error": call.recorded_error,
        "sentence": describe(call, recording),
    }


def _place(found: Difference, recording: Recording) -> list[str]:
    words = []
    if found.row is not None:
        row = found.row if found.step_row is None else found.step_row
        kind = "row" if found.step_row is not None else "row of the call"
        request, position = _request_of(found, recording)
        named = "" if request is None else f" (request {request}, position {position})"
        words.append(f"{kind} {row}{named}")
    if found.head is not None:
        words.append(f"head {found.head}")
    return words


def _request_of(found: Difference, recording: Recording) -> tuple[str | None, int | None]:
    """Name (or number, if names were redacted) and position of the row's token."""
    step = recording.step
    if step is None or found.step_row is None:
        return None, None
    request, position = step.geometry.rows.host_rows()
    number = int(request[found.step_row])
    if number < 0:
        return "none: padding", None
    name = str(number) if step.request_ids is None else repr(step.request_ids[number])
    return name, int(position[found.step_row])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
