"""One client request while the engine works on it: all its prompts and choices, one stream.

In:  `Job`: prompts as token ids with their SamplingParams.
Out: the place of a prompt and its Deltas, as they come; the usage so far; at the end the metrics
     and one line in the log. Prompts are logged only if the server was told so.
Closing it early, as when the client leaves, aborts what still runs.
Errors: what the engine says against the request comes out of `start`, before any output; a choice
that fails later raises GnomonError out of `note`, the engine's death EngineDeadError.
Not here: the shape of answers (chat.py, completions.py), HTTP (stream.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import GnomonError
from gnomon.frontend.outputs import Delta
from gnomon.server.answer_types import PromptTokensDetails, Usage
from gnomon.server.engine_port import DeltaStream, EnginePort
from gnomon.server.metrics import ServerMetrics
from gnomon.server.prompts import PreparedPrompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a client asked for. `params` has one entry per prompt; `engine_id` is unique alive.

    interval: tokens of a choice that may wait for each other (EnginePort.start).
    """

    answer_id: str
    engine_id: str
    prompts: Sequence[PreparedPrompt]
    params: Sequence[SamplingParams]
    priority: int = 0
    cache_salt: str = ""
    interval: int = 1
    user: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts; a prompt counts once, however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


class Generation:
    """A running job. Use: `start`, `arrived` until the end with `note`, always `close`."""

    def __init__(
        self, engine: EnginePort, metrics: ServerMetrics, job: Job, *, logs_prompt: bool = False
    ) -> None:
        self.job = job
        self._engine = engine
        self._metrics = metrics
        self._logs_prompt = logs_prompt
        self._streams: list[DeltaStream] = []
        self._merged: _Merged | None = None  # of several prompts
        self._num_cached = [0] * len(job.prompts)
        self._num_generated = 0
        self._began = time.monotonic()
        self._first_s: float | None = None
        self._last: dict[tuple[int, int], float] = {}
        self._reasons: list[str] = []
        self._is_closed = False

    async def start(self) -> None:
        """Hand every prompt to the engine, or none: the error of one takes back the others."""
        job = self.job
        if self._logs_prompt:
            for prompt, params in zip(job.prompts, job.params, strict=True):
                shown = prompt.token_ids if prompt.text is None else prompt.text
                logger.info("%s prompt=%r %s", job.answer_id, shown, params)
        try:
            for place, prompt in enumerate(job.prompts):
                stream = await self._engine.start(
                    prompt.token_ids,
                    job.params[place],
                    request_id=f"{job.engine_id}-{place}",
                    priority=job.priority,
                    cache_salt=job.cache_salt,
                    interval=job.interval,
                )
                self._streams.append(stream)
            if len(self._streams) > 1:
                self._merged = _Merged(self._streams)
        except BaseException:
            self._is_closed = True
            await self._release()
            raise

    async def arrived(self) -> tuple[int, Sequence[Delta]]:
        """What one prompt has brought since the last look, its place first; no deltas at the end.

        Whoever takes them calls `note` for each before its text is used.
        """
        if self._merged is None:
            return 0, await self._streams[0].arrived()
        return await self._merged.arrived()

    def usage(self) -> Usage:
        """Tokens so far."""
        num_prompt = self.job.num_prompt_tokens
        num_cached = sum(self._num_cached)
        return Usage(
            num_prompt,
            self._num_generated,
            num_prompt + self._num_generated,
            PromptTokensDetails(num_cached),
            num_cached,
            num_prompt - num_cached,
        )

    async def close(self) -> None:
        """Abort what still runs, then write the log line and the metrics. Safe to call again."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._release()
        num_choices = sum(params.n for params in self.job.params)
        for _ in range(num_choices - len(self._reasons)):
            self._finish("abort")
        self._report(time.monotonic() - self._began)

    async def _release(self) -> None:
        if self._merged is not None:
            await self._merged.close()
        for stream in self._streams:
            await stream.aclose()

    def note(self, place: int, delta: Delta) -> None:
        """Account for a delta; GnomonError if it says that its choice has failed."""
        now = time.monotonic()
        count = len(delta.token_ids)
        key = (place, delta.index)
        if count:
            previous = self._last.get(key)
            if previous is None:
                if delta.index == 0:
                    self._num_cached[place] = delta.num_cached_tokens
                if self._first_s is None:
                    self._first_s = now - self._began
                    self._metrics.time_to_first_token.observe(self._first_s)
                    self._metrics.queue_time.observe(delta.queue_s)
                    self._metrics.prefill_time.observe(max(0.0, self._first_s - delta.queue_s))
                self._metrics.inter_token_latency.observe(0.0, count - 1)  # came with the first
            else:
                self._metrics.inter_token_latency.observe((now - previous) / count, count)
            self._last[key] = now
            self._num_generated += count
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason)
            if delta.finish_reason == "error":
                raise GnomonError(delta.error or "the request failed inside the engine")

    def _finish(self, reason: str) -> None:
        self._reasons.append(reason)
        self._metrics.count_finish(reason)

    def _report(self, total_s: float) -> None:
        job, metrics = self.job, self._metrics
        metrics.e2e_latency.observe(total_s)
        metrics.prompt_length.observe(job.num_prompt_tokens)
        metrics.generation_length.observe(self._num_generated)
        first_s = self._first_s
        num_further = self._num_generated - len(self._last)
        if first_s is not None:
            metrics.decode_time.observe(total_s - first_s)
        if first_s is not None and num_further > 0:
            # Choices run side by side: a token of each takes the time of one.
            per_choice = num_further / len(self._last)
            metrics.time_per_output_token.observe((total_s - first_s) / per_choice)
        logger.info(
            "%s finish=%s prompt=%d cached=%d generated=%d ttft=%s total=%.3fs%s",
            job.answer_id,
            ",".join(sorted(set(self._reasons))),
            job.num_prompt_tokens,
            sum(self._num_cached),
            self._num_generated,
            "none" if first_s is None else f"{first_s:.3f}s",
            total_s,
            "" if job.user is None else f" user={job.user!r}",
        )


class _Merged:
    """Several streams as one. The first error of any ends it."""

    def __init__(self, streams: Sequence[DeltaStream]) -> None:
        self._queue: asyncio.Queue[tuple[int, Sequence[Delta] | Exception]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(*pair)) for pair in enumerate(streams)]
        self._num_open = len(streams)

    async def arrived(self) -> tuple[int, Sequence[Delta]]:
        """(place of the stream, its deltas); no deltas when all streams have ended."""
        while self._num_open:
            place, found = await self._queue.get()
            if isinstance(found, Exception):
                raise found
            if found:
                return place, found
            self._num_open -= 1
        return 0, ()

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, place: int, stream: DeltaStream) -> None:
        try:
            while deltas := await stream.arrived():
                self._queue.put_nowait((place, deltas))
            self._queue.put_nowait((place, ()))
        except Exception as error:  # raised again above, where somebody listens
            self._queue.put_nowait((place, error))
