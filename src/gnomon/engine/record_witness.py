"""The witness: runs steps for the core when some of them are recorded or shadowed.

In:  batches, one a step, and whom to tell: a StepRecorder, a Shadow, or both.
Out: what the runner gives, unchanged. A chosen step runs through operators that keep their calls.
A step that raises, or of which a request must fail (NaN, a broken rule of checked mode), is run
once more, unchecked, to be recorded: steps that succeed cost nothing, and the second run writes
what the first wrote, so that nobody sees a difference.
The engine has no witness unless it is asked to record or to shadow.
Not here: capturing (attention/recording_capture.py), files (record.py), comparing (shadow.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.recording import RecordedStep, Recording
from gnomon.attention.recording_capture import Capture, Limits
from gnomon.attention.recording_step import plan_values
from gnomon.attention.routes import AttentionDims
from gnomon.engine.batch import Batch, DecodeBatch
from gnomon.engine.messages import ShadowStats
from gnomon.engine.record import StepRecorder
from gnomon.engine.runner import Runner, RunOutput, Taps
from gnomon.engine.schedule_step import StepSchedule
from gnomon.engine.shadow import SHADOW_LIMITS, Shadow
from gnomon.engine.step_checks import is_device_error


@dataclass(frozen=True, slots=True)
class Subject:
    """What every recording says of the engine, and the names of its pools."""

    origin: Mapping[str, str]
    dims: AttentionDims
    hidden_size: int
    providers: Mapping[str, str]
    pools: Mapping[str, PagedPool]

    def capture(self, batch: Batch, limits: Limits) -> Capture:
        """A capture for one step."""
        parts = {id(pool): name for name, pool in self.pools.items()}
        return Capture(batch.geometry, batch.plan, parts, limits)

    def recording(
        self, capture: Capture, batch: Batch, step_id: int, reason: str, error: str = ""
    ) -> Recording:
        """What a capture has kept, with the step that it is of."""
        return Recording(
            origin=self.origin,
            dims=self.dims,
            hidden_size=self.hidden_size,
            providers=self.providers,
            calls=tuple(capture.calls),
            step=RecordedStep(
                step_id,
                batch.geometry,
                plan_values(batch.plan),
                batch.request_ids,
                batch.token_ids.data,
            ),
            reason=reason,
            error=error,
        )


class Witness:
    """Runs steps (module docstring)."""

    def __init__(
        self,
        runner: Runner,
        subject: Subject,
        recorder: StepRecorder | None = None,
        shadow: Shadow | None = None,
    ) -> None:
        self._runner = runner
        self._subject = subject
        self._recorder = recorder
        self._shadow = shadow

    def run(self, step_id: int, batch: Batch | DecodeBatch, taps: Taps | None) -> RunOutput:
        """Run one step as ``Runner.run`` does; what it raises goes through."""
        capture = reason = None
        if self._recorder is not None and self._recorder.wants(step_id):
            batch = batch.eager()
            capture, reason = self._subject.capture(batch, Limits()), "chosen"
        elif self._shadow is not None and self._shadow.wants(step_id):
            batch = batch.eager()
            capture, reason = self._subject.capture(batch, SHADOW_LIMITS), "shadow"
        try:
            output = self._runner.run(batch, taps, self._operators(capture, batch))
        except Exception as error:
            if not is_device_error(error):  # else nothing runs any more
                self._record_failure(step_id, batch, f"{type(error).__name__}: {error}")
            raise
        if self._recorder is not None and (fault := _fault(output)):
            self._record_failure(step_id, batch, fault)
        if capture is not None and reason is not None:
            self._hand_on(self._subject.recording(capture, batch.eager(), step_id, reason))
        return output

    def write_down(self, schedule: StepSchedule, error: BaseException) -> None:
        """Keep what the host knows of a step after an error that took the device with it."""
        if self._recorder is not None:
            vocab_size = self._runner.model.config.vocab_size
            origin = {**self._subject.origin, "vocab_size": vocab_size}
            self._recorder.keep_facts(schedule, f"{type(error).__name__}: {error}", origin)

    def shadow_stats(self) -> ShadowStats | None:
        """What the shadow has found so far; None if there is none."""
        return None if self._shadow is None else self._shadow.stats()

    def close(self) -> None:
        """End the shadow's process. Idempotent."""
        if self._shadow is not None:
            self._shadow.close()

    def _operators(self, capture: Capture | None, batch: Batch | DecodeBatch) -> Operators | None:
        if capture is None:
            return None
        return capture.wrapped(self._runner.operators(batch.eager().plan))

    def _hand_on(self, recording: Recording) -> None:
        if recording.reason == "shadow" and self._shadow is not None:
            self._shadow.offer(recording)
        elif self._recorder is not None:
            self._recorder.keep(recording, "chosen")

    def _record_failure(self, step_id: int, failed: Batch | DecodeBatch, error: str) -> None:
        """Run the step again and keep it, up to where it fails again."""
        if self._recorder is None or not self._recorder.has_room("failed"):
            return
        batch = failed.eager()
        capture = self._subject.capture(batch, Limits())
        try:
            output = self._runner.run(
                batch, None, self._operators(capture, batch), is_checked=False
            )
        except Exception as second:
            again = f"{type(second).__name__}: {second}"
        else:
            again = _fault(output)
        if again != error:
            error += f" (recorded in a second run, which gave: {again or 'no error'})"
        recording = self._subject.recording(capture, batch, step_id, "failed", error)
        self._recorder.keep(recording, "failed")


def _fault(output: RunOutput) -> str:
    """Why requests of this step must fail; empty if none must."""
    reasons = sorted(set(output.verdict.faults().values()))
    if not reasons and bool(output.logits.isnan().any()):
        reasons = ["a logit is NaN"]
    return f"NumericsError: {'; '.join(reasons)}" if reasons else ""
