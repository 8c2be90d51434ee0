"""/v1/completions: prompts in, their continuations out, whole or as they come.

In:  CompletionRequest: a text, several, token ids, or several lists of them.
Out: a Response: CompletionAnswer as JSON or as events. Choice number `i * n + j` is choice j of
     prompt i. With `echo` each text begins with its prompt, and its logprobs with the prompt's.
Not here: tokenization (prompts.py), sampling parameters (sampling.py), the SSE lines (stream.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
from fastapi import Request, Response
from msgspec import UNSET, UnsetType

from gnomon.engine.messages import TokenLogprobs
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import GnomonError, RequestError
from gnomon.frontend.outputs import Delta
from gnomon.server.answer_types import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
)
from gnomon.server.body import read_model
from gnomon.server.envelope import Envelope
from gnomon.server.generation import Generation, Job
from gnomon.server.logprobs import CompletionLogprobsWriter, prompt_logprobs
from gnomon.server.prompts import raw_prompts
from gnomon.server.request_fields import UNSUPPORTED
from gnomon.server.request_types import CompletionRequest
from gnomon.server.respond import respond, started
from gnomon.server.sampling import COMPLETION_MAX_TOKENS, resolve_max_tokens, sampling_params
from gnomon.server.state import ServerState, request_id_of, state_of
from gnomon.server.streaming_options import UsageReport, interval_of, usage_report


async def completions(request: Request) -> Response:
    """Continue raw prompts."""
    state = state_of(request)
    body = await read_model(request, CompletionRequest, state.settings.max_body_bytes)
    report = usage_report(body)
    job = await _job(state, body, request_id_of(request))
    generation = await started(state, job)
    writer = _CompletionWriter(state, body, generation, report)
    return await respond(request, state, generation, writer, streams=bool(body.stream))


async def _job(state: ServerState, body: CompletionRequest, request_id: str) -> Job:
    state.check(body)
    num_choices = body.n or 1
    if body.echo and body.logprobs is not None and num_choices > 1:
        raise RequestError(
            "echo with logprobs is supported for n = 1 only; leave out one of them",
            param="echo",
            code=UNSUPPORTED,
        )
    info = state.engine.info
    prompts = await raw_prompts(state.engine, body)

    def params(num_prompt_tokens: int) -> SamplingParams:
        made = sampling_params(
            body,
            info.generation_defaults,
            max_tokens=resolve_max_tokens(
                body, num_prompt_tokens, info.max_model_len, COMPLETION_MAX_TOKENS
            ),
            num_logprobs=body.logprobs,
        )
        if body.echo and body.logprobs is not None and made.prompt_logprobs is None:
            made = msgspec.structs.replace(made, prompt_logprobs=body.logprobs)
        return made

    return Job(
        answer_id=f"cmpl-{body.request_id or request_id}",
        engine_id=state.engine_id(),
        prompts=prompts,
        params=[params(len(prompt.token_ids)) for prompt in prompts],
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        interval=interval_of(body, state.settings.stream_interval),
        user=body.user,
    )


@dataclass(slots=True)
class _Choice:
    """One choice as far as it has come. `echo` is the prompt's text until it has been given out."""

    prompt_ids: list[int]
    echo: str
    scores: CompletionLogprobsWriter | None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[CompletionLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    last: Delta | None = None


class _CompletionWriter:
    """Makes the answer of one request, by either way."""

    def __init__(
        self,
        state: ServerState,
        body: CompletionRequest,
        generation: Generation,
        report: UsageReport,
    ) -> None:
        self._body = body
        self._generation = generation
        self._report = report
        self._engine = state.engine
        self._model = state.model_name
        self._created = int(time.time())
        self._num_choices = body.n or 1
        self._sends_ids = bool(body.return_token_ids)
        self._envelope: Envelope | None = None
        self._choices: list[_Choice] = []
        for prompt in generation.job.prompts:
            text = ""
            if body.echo:
                text = prompt.text or state.engine.language.tokenizer.decode(prompt.token_ids)
            self._choices.extend(
                _Choice(prompt.token_ids, text, self._scorer()) for _ in range(self._num_choices)
            )

    def _scorer(self) -> CompletionLogprobsWriter | None:
        """None where no logprobs are wanted: then an engine without a tokenizer will do."""
        if self._body.logprobs is None:
            return None
        return CompletionLogprobsWriter(self._engine.language.tokenizer)

    def event(self, place: int, delta: Delta) -> bytes:
        """The event of a delta; the last one of a choice has its finish_reason."""
        if self._envelope is None or self._report.always:
            self._envelope = Envelope(self._answer([], is_last=False))
        return self._envelope.around(self._chunk_choice(place, delta))

    def closing_event(self) -> bytes | None:
        """The usage, if wanted."""
        return msgspec.json.encode(self._answer([], is_last=True)) if self._report.at_end else None

    def add(self, place: int, delta: Delta) -> None:
        """Keep what a delta brings, for the whole answer."""
        choice = self._choices[place * self._num_choices + delta.index]
        choice.text.append(self._text(choice, delta))
        choice.token_ids.extend(delta.token_ids)
        scores = self._scores(choice, delta)
        if scores is not None:
            choice.logprobs.append(scores)
        if delta.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            tokenizer = self._engine.language.tokenizer
            choice.prompt_logprobs = prompt_logprobs(delta.prompt_logprobs, tokenizer)
        choice.last = delta

    def answer(self) -> CompletionAnswer:
        """The whole answer, of all that was added."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return self._answer(choices, is_last=True)

    def _answer(self, choices: list[CompletionChoice], *, is_last: bool) -> CompletionAnswer:
        generation = self._generation
        return CompletionAnswer(
            id=generation.job.answer_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=generation.usage() if is_last else self._report.so_far(generation),
        )

    def _chunk_choice(self, place: int, delta: Delta) -> CompletionChoice:
        index = place * self._num_choices + delta.index
        choice = self._choices[index]
        sends_ids = self._sends_ids
        is_first = choice.last is None
        scores = self._scores(choice, delta)
        text = self._text(choice, delta)
        choice.last = delta
        return CompletionChoice(
            index,
            text,
            scores,
            delta.finish_reason,
            UNSET if delta.finish_reason is None else delta.stop_reason,
            list(delta.token_ids) if sends_ids else UNSET,
            choice.prompt_ids if sends_ids and is_first else UNSET,
        )

    def _text(self, choice: _Choice, delta: Delta) -> str:
        """The text of a delta, behind the prompt's the first time."""
        echo, choice.echo = choice.echo, ""
        return echo + delta.text

    def _scores(self, choice: _Choice, delta: Delta) -> CompletionLogprobs | None:
        """The logprobs of a delta, behind the prompt's the first time if it is echoed."""
        if choice.scores is None:
            return None
        ids: list[int] = list(delta.token_ids)
        scores: list[TokenLogprobs | None] = list(delta.logprobs or ())
        if self._body.echo and choice.last is None:
            ids = [*choice.prompt_ids, *ids]
            scores = [*(delta.prompt_logprobs or ()), *scores]
        return choice.scores.write(ids, scores)

    def _whole(self, index: int, choice: _Choice) -> CompletionChoice:
        if choice.last is None or choice.last.finish_reason is None:
            raise GnomonError(f"choice {index} ended without a reason")
        sends_ids = self._sends_ids
        return CompletionChoice(
            index,
            "".join(choice.text),
            _joined(choice.logprobs) if self._body.logprobs is not None else None,
            choice.last.finish_reason,
            choice.last.stop_reason,
            choice.token_ids if sends_ids else UNSET,
            choice.prompt_ids if sends_ids else UNSET,
            choice.prompt_logprobs,
        )


def _joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        [offset for part in parts for offset in part.text_offset],
        [value for part in parts for value in part.token_logprobs],
        [token for part in parts for token in part.tokens],
        [top for part in parts for top in part.top_logprobs],
    )
