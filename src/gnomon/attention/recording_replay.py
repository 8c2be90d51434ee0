"""Replay: run the calls of a recording through a provider and find where it differs.

In:  a Recording, a Provider, a device.
Out: ReplayReport: a verdict per call, the first call that differs beyond its operator's tolerance.
Every call gets the recorded inputs, not what the call before it gave just now, so that a difference
names the operator that made it and nobody downstream. A call that raised when it was recorded has
no results; the reference's are taken for them.
Not here: files, printing (cli/replay.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from gnomon.attention.dispatch import OpNeed, Provider
from gnomon.attention.providers import reference
from gnomon.attention.recording import PoolPart, RecordedCall, Recording
from gnomon.attention.recording_calls import SHAPES, WRITTEN, observed
from gnomon.attention.recording_compare import (
    Comparison,
    Difference,
    compare_results,
    compute_dtype,
)
from gnomon.errors import GeometryError, UnsupportedError


@dataclass(frozen=True, slots=True)
class CallReport:
    """How one call came out. ``skipped``: why it was not run; then it counts for nothing."""

    number: int
    op: str
    layer: int | None
    part: str | None
    comparison: Comparison = field(default_factory=lambda: Comparison(True, 0.0, 0.0))
    skipped: str = ""
    recorded_error: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the call was not run, or came out as recorded within the tolerance."""
        return bool(self.skipped) or self.comparison.is_ok


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """All calls of a recording through one provider."""

    provider: str
    calls: tuple[CallReport, ...]
    geometry_fault: str  # what Geometry.check() says of the recorded step; empty if nothing

    @property
    def first(self) -> CallReport | None:
        """The first call that differs."""
        return next((call for call in self.calls if not call.is_ok), None)

    @property
    def num_run(self) -> int:
        """Calls that were run and compared."""
        return sum(not call.skipped for call in self.calls)

    @property
    def skipped(self) -> dict[str, int]:
        """How many calls were not run, by reason."""
        return dict(Counter(call.skipped for call in self.calls if call.skipped))


def replay(
    recording: Recording, provider: Provider, device: torch.device | str = "cpu"
) -> ReplayReport:
    """Run every call that was kept and that the provider supports.

    Raises UnsupportedError, with the reasons, if that is not a single one.
    """
    numbered = range(len(recording.calls))
    reports = tuple(replay_some(recording, provider, numbered, device))
    if recording.calls and all(report.skipped for report in reports):
        why = "; ".join(sorted({f"{report.op}: {report.skipped}" for report in reports}))
        raise UnsupportedError(
            f"provider {provider.name!r} can run no call of this recording: {why}"
        )
    return ReplayReport(provider.name, reports, _geometry_fault(recording))


def replay_some(
    recording: Recording,
    provider: Provider,
    numbers: Iterable[int],
    device: torch.device | str = "cpu",
) -> Iterator[CallReport]:
    """The reports of these calls, one after the other as they are run."""
    for number in numbers:
        call = recording.calls[number]
        with torch.inference_mode():
            yield _report(number, call, recording, provider, device)


def _report(
    number: int,
    call: RecordedCall,
    recording: Recording,
    provider: Provider,
    device: torch.device | str,
) -> CallReport:
    why = call.withheld or _refusal(call, recording, provider, device)
    if why:
        return CallReport(number, call.op, call.layer, call.part, skipped=why)
    try:
        expected = call.results
        if expected is None:
            expected, _ = _run(call, reference.PROVIDER, device)
        found, stray = _run(call, provider, device)
    except Exception as error:  # a kernel may raise anything; that is a verdict too
        comparison = _incomparable(f"raised {type(error).__name__}: {error}")
        return CallReport(
            number, call.op, call.layer, call.part, comparison, recorded_error=call.error
        )
    return CallReport(
        number,
        call.op,
        call.layer,
        call.part,
        stray or compare_results(call, found, expected),
        recorded_error=call.error,
    )


def _run(
    call: RecordedCall, provider: Provider, device: torch.device | str
) -> tuple[dict[str, torch.Tensor], Comparison | None]:
    """What the kernel returned or wrote; and a verdict if it wrote beside its slots."""
    arguments = call.build(device)
    result = provider.kernel(call.op)(*arguments)
    found = observed(call.op, arguments, result)
    shape = SHAPES[call.op]
    if shape.pool is None:
        return found, None
    part: PoolPart = call.arguments[shape.pool]
    stray = part.stray_slots(arguments[shape.pool])
    if not stray.numel():
        return found, None
    page, offset = divmod(int(stray[0]), part.page_size)
    note = f"offset {offset} of page {int(part.page_ids[page])} was written; no row names that slot"
    return found, _incomparable(note)


def _refusal(
    call: RecordedCall, recording: Recording, provider: Provider, device: torch.device | str
) -> str:
    """Why the provider cannot run this call; empty if it can."""
    place = SHAPES[call.op].pool
    layout = None if place is None else call.arguments[place].layout.id
    need = OpNeed(
        device=torch.device(device).type,
        dtype=compute_dtype(call),
        dims=recording.dims,
        latent_layout=layout,
        index_layout=layout,
    )
    verdict = provider.supports(call.op, need)
    return "" if verdict.is_ok else f"{provider.name} {verdict.reason}"


def _incomparable(note: str) -> Comparison:
    return Comparison(
        False, math.inf, math.inf, Difference(WRITTEN if "slot" in note else "", note)
    )


def _geometry_fault(recording: Recording) -> str:
    if recording.step is None:
        return ""
    try:
        recording.step.geometry.check()
    except GeometryError as error:
        return str(error)
    return ""
