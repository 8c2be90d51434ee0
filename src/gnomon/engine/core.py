"""The heart of the engine: schedule, build the batch, run, sample, commit, one step at a time.

In:  EngineRequests (token ids).
Out: OutputDeltas, one per request that a step brought forward or ended.
A fault of one request (NaN in its rows, a broken rule of checked mode) ends that request with
finish_reason "error" and touches no other. An exception out of `step` ends all requests of that
step, without deltas: whoever drives the engine must tell their clients; process.py takes it as
fatal.
Single-threaded; steps do not overlap.
Not here: text, other processes (process.py), what the parts do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gnomon.engine.assembly import Parts, Progress, assemble
from gnomon.engine.batch import Batch, DecodeBatch
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
from gnomon.engine.sampler import SampledRows
from gnomon.engine.schedule_step import StepSchedule
from gnomon.engine.wire import EngineInfo
from gnomon.errors import GnomonError


class EngineCore:
    """One engine. `taps` may be set between steps to listen to what the model computes."""

    def __init__(self, parts: Parts) -> None:
        self.taps: Taps | None = None
        self._parts = parts
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        return self._parts.info

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._parts.scheduler.has_work

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
        """Bring the requests forward by one step."""
        parts = self._parts
        schedule = parts.scheduler.schedule()
        for request_id in schedule.released:
            self._forget(request_id)
        if schedule.is_empty:
            if parts.scheduler.has_work:
                raise GnomonError("requests wait but none can run: the scheduler is stuck")
            return []
        try:
            batch = parts.builder.build(schedule)
            output = self._run(schedule.step_id, batch)
            pending = parts.sampler.launch(output.logits, batch.samples)
            landing = Landing((pending.token_ids, pending.greatest, output.verdict.flags))
            token_ids, greatest, flags = landing.wait()
            sampled = pending.finish(token_ids, greatest)
            faults = output.verdict.faults(flags)
        except BaseException as error:  # an interrupt too: its pages must not stay in flight
            parts.scheduler.fail_step(schedule, "the step was not completed")
            error.add_note(f"in step {schedule.step_id}")
            raise
        self._keep_prompt_logprobs(batch, output)
        return self._commit(schedule, faults, sampled, batch)

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
        """The delta with its log-probabilities; unchanged where none are wanted."""
        prompt = self._prompt_logprobs.pop(delta.request_id, None)
        if logprobs is None and prompt is None:
            return delta
        return msgspec.structs.replace(
            delta,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=prompt,
        )

    def _keep_prompt_logprobs(self, batch: Batch | DecodeBatch, output: RunOutput) -> None:
        """Collect a prompt's scores chunk by chunk; a recomputed chunk replaces its first run."""
        for part in batch.prompt_rows:
            name = part.request.request_id
            kept = self._prompt_logprobs.setdefault(name, [None])
            kept[part.first :] = output.prompt_logprobs[name]

    def _forget(self, request_id: str) -> None:
        self._parts.builder.drop(request_id)
        self._parts.sampler.drop(request_id)
        self._prompt_logprobs.pop(request_id, None)


def build_core(
    config: EngineConfig,
    progress: Progress | None = None,
    default_vocab_size: int | None = None,
) -> EngineCore:
    """Assemble an engine; ConfigError or CheckpointError if that cannot be.

    `default_vocab_size`: of a random model that names none (the tokenizer's).
    """
    return EngineCore(assemble(config, progress or (lambda *_: None), default_vocab_size))
