"""The heart of the engine: schedule, build the batch, run, sample, commit, one step at a time.

In:  EngineRequests (token ids).
Out: OutputDeltas, one per request that a step brought forward or ended.
A fault of one request (NaN in its rows, a broken rule of checked mode) ends that request with
finish_reason "error" and touches no other. An exception out of `step` ends all requests of that
step, without deltas: whoever drives the engine must tell their clients; process.py takes it as
fatal.
Single-threaded. Where steps overlap (`Parts.overlaps`), `step` queues a step on the device and then
lands the one before: its tokens come to the host, are committed and become deltas, while the device
works on. The tokens are the same either way. They do not overlap while somebody listens.
Not here: text, other processes (process.py), what the parts do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gnomon.engine.assembly import Parts, Progress, assemble
from gnomon.engine.batch import Batch, DecodeBatch, Fed
from gnomon.engine.config import EngineConfig
from gnomon.engine.landing import Landing
from gnomon.engine.messages import (
    EngineRequest,
    EngineStats,
    OutputDelta,
    ShadowStats,
    TokenLogprobs,
)
from gnomon.engine.runner import RunOutput, Taps
from gnomon.engine.sampler import PendingSample, SampledRows
from gnomon.engine.schedule_step import StepSchedule
from gnomon.engine.step_checks import is_device_error
from gnomon.engine.wire import EngineInfo
from gnomon.errors import GnomonError


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A step that is queued on the device and has not landed."""

    schedule: StepSchedule
    batch: Batch | DecodeBatch
    output: RunOutput
    pending: PendingSample
    landing: Landing

    def fed(self) -> Fed:
        """Its tokens, for the step after it to feed on."""
        names = (row.request.request_id for row in self.batch.samples)
        return Fed(self.pending.token_ids, {name: row for row, name in enumerate(names)})


class EngineCore:
    """One engine. `taps` may be set between steps to listen to what the model computes."""

    def __init__(self, parts: Parts) -> None:
        self.taps: Taps | None = None
        self._parts = parts
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._in_flight: _Launched | None = None
        self._lost: tuple[_Launched | None, ...] = ()  # steps that a fault ended
        self._queue_s: dict[str, float] = {}  # of requests that have no token yet

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        return self._parts.info

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._parts.scheduler.has_work or self._in_flight is not None

    def stats(self) -> EngineStats:
        """Gauges and counters as they are now."""
        stats, checker = self._parts.scheduler.stats(), self._parts.checker
        changes: dict[str, object] = {}
        if (shadow := self.shadow_stats()) is not None:
            changes["shadow"] = shadow
        if checker is not None:
            changes["checks"] = checker.num_checks
            changes["check_violations"] = checker.num_violations
        return msgspec.structs.replace(stats, **changes) if changes else stats

    def shadow_stats(self) -> ShadowStats | None:
        """What shadow mode has found so far, None without it. From any thread."""
        witness = self._parts.witness
        return None if witness is None else witness.shadow_stats()

    def close(self) -> None:
        """End what runs beside the engine. Idempotent; the engine itself needs no end."""
        if self._parts.witness is not None:
            self._parts.witness.close()

    def check_integrity(self) -> None:
        """Raise GnomonError if queues or pages disagree. For tests; slow."""
        self._parts.scheduler.check_integrity()

    def reset_prefix_cache(self) -> None:
        """Forget every cached page that no request holds."""
        self._parts.scheduler.pages.evict_all()

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests, all or none. Raises RequestError or OverloadError."""
        info, scheduler = self.info, self._parts.scheduler
        for request in requests:
            request.validate(info.vocab_size, info.max_model_len)
        scheduler.require_room(len(requests))
        added: list[str] = []
        try:
            for request in requests:
                scheduler.add(request)
                added.append(request.request_id)
        except GnomonError:
            self.abort(added)
            raise

    def abort(self, request_ids: Sequence[str]) -> list[OutputDelta]:
        """End requests; unknown ids are ignored."""
        deltas = [self._parts.scheduler.abort(request_id) for request_id in request_ids]
        return [delta for delta in deltas if delta is not None]

    def abort_all(self) -> list[OutputDelta]:
        """End every request."""
        return self.abort(self._parts.scheduler.request_ids)

    def step(self) -> list[OutputDelta]:
        """Bring the requests forward by one step; where steps overlap, the deltas lag by one."""
        before, self._in_flight = self._in_flight, None
        is_overlapping = self._parts.overlaps and self.taps is None
        deltas: list[OutputDelta] = []
        if before is not None and not is_overlapping:
            deltas, before = self._land(before), None
        launched = self._launch(before)
        if is_overlapping:
            self._in_flight, launched = launched, before
        return deltas if launched is None else deltas + self._land(launched)

    def _launch(self, before: _Launched | None) -> _Launched | None:
        """Queue the next step on the device, if there is one; `before` is still in flight."""
        parts = self._parts
        schedule = parts.scheduler.schedule(is_ahead=before is not None)
        for request_id in schedule.released:
            self._forget(request_id)
        if schedule.is_empty:
            if parts.scheduler.has_work and before is None:
                raise GnomonError("requests wait but none can run: the scheduler is stuck")
            return None
        now = time.monotonic()
        for item in schedule.items:
            if item.num_computed < item.num_prompt_tokens:
                waited = max(0.0, now - (item.request.arrival_s or now))
                self._queue_s.setdefault(item.request_id, waited)
        try:
            batch = parts.builder.build(schedule, None if before is None else before.fed())
            output = self._run(schedule.step_id, batch)
            pending = parts.sampler.launch(output.logits, batch.samples)
            if parts.overlaps:
                parts.runner.remember(pending.token_ids)
            landing = Landing((pending.token_ids, pending.greatest, output.verdict.flags))
        except BaseException as error:  # an interrupt too: its pages must not stay in flight
            self._fail(error, before, schedule)
            raise
        return _Launched(schedule, batch, output, pending, landing)

    def _land(self, launched: _Launched) -> list[OutputDelta]:
        """Wait for a step, commit it, say what it brought."""
        output, pending = launched.output, launched.pending
        try:
            token_ids, greatest, flags = launched.landing.wait()
            sampled = pending.finish(token_ids, greatest)
            faults = output.verdict.faults(flags)
        except BaseException as error:
            after = None if self._in_flight is None else self._in_flight.schedule
            # Where the device is lost, freeing its memory ends the process before it can tell.
            self._lost, self._in_flight = (launched, self._in_flight), None
            self._fail(error, launched, after)
            raise
        self._keep_prompt_logprobs(launched.batch, output)
        return self._commit(launched.schedule, faults, sampled, launched.batch)

    def _fail(
        self, error: BaseException, first: _Launched | None, second: StepSchedule | None
    ) -> None:
        """Give up the steps that had begun, in their order; name them in the error."""
        schedules = [] if first is None else [first.schedule]
        schedules += [] if second is None else [second]
        for schedule in schedules:
            self._parts.scheduler.fail_step(schedule, "the step was not completed")
        if is_device_error(error) and schedules and self._parts.witness is not None:
            self._parts.witness.write_down(schedules[0], error)
        steps = " or ".join(str(schedule.step_id) for schedule in schedules)
        error.add_note(f"in step {steps}")

    def _run(self, step_id: int, batch: Batch | DecodeBatch) -> RunOutput:
        """Run the batch; before witnesses, where steps are recorded or shadowed."""
        witness = self._parts.witness
        if witness is None:
            return self._parts.runner.run(batch, self.taps)
        return witness.run(step_id, batch, self.taps)

    def _commit(
        self,
        schedule: StepSchedule,
        faults: dict[str, str],
        sampled: SampledRows,
        batch: Batch | DecodeBatch,
    ) -> list[OutputDelta]:
        """Fail the faulty requests, commit the tokens of the others, complete the deltas."""
        names = [row.request.request_id for row in batch.samples]
        unsampled = {name: why for name, why in zip(names, sampled.errors, strict=True) if why}
        faults = unsampled | faults
        scheduler = self._parts.scheduler
        failed = [scheduler.fail(name, why) for name, why in faults.items()]
        tokens = {name: [token] for name, token in zip(names, sampled.token_ids, strict=True)}
        deltas = scheduler.commit(schedule, tokens)
        logprobs = dict(zip(names, sampled.logprobs, strict=True))
        return [delta for delta in failed if delta is not None] + [
            self._completed(delta, logprobs[delta.request_id]) for delta in deltas
        ]

    def _completed(self, delta: OutputDelta, logprobs: TokenLogprobs | None) -> OutputDelta:
        """The delta with its log-probabilities and, with its first token, the time it queued."""
        prompt = self._prompt_logprobs.pop(delta.request_id, None)
        queue_s = self._queue_s.pop(delta.request_id, 0.0)
        if logprobs is None and prompt is None and not queue_s:
            return delta
        return msgspec.structs.replace(
            delta,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=prompt,
            queue_s=queue_s,
        )

    def _keep_prompt_logprobs(self, batch: Batch | DecodeBatch, output: RunOutput) -> None:
        """Collect a prompt's scores chunk by chunk; a recomputed chunk replaces its first run."""
        for part in batch.prompt_rows:
            if not self._parts.scheduler.is_alive(part.request):
                continue  # it ended while its step was in flight
            name = part.request.request_id
            kept = self._prompt_logprobs.setdefault(name, [None])
            kept[part.first :] = output.prompt_logprobs[name]

    def _forget(self, request_id: str) -> None:
        self._parts.builder.drop(request_id)
        self._parts.sampler.drop(request_id)
        self._prompt_logprobs.pop(request_id, None)
        self._queue_s.pop(request_id, None)


def build_core(
    config: EngineConfig,
    progress: Progress | None = None,
    default_vocab_size: int | None = None,
) -> EngineCore:
    """Assemble an engine; ConfigError or CheckpointError if that cannot be.

    `default_vocab_size`: of a random model that names none (the tokenizer's).
    """
    return EngineCore(assemble(config, progress or (lambda *_: None), default_vocab_size))
