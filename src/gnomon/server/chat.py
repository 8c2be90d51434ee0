"""/v1/chat/completions: a conversation in, the assistant's turn out, whole or as it comes.

In:  ChatRequest.
Out: a Response: ChatAnswer as JSON, or ChatChunks as events. Both are made from the same deltas, so
     the streamed text is the whole text.
The text of each choice goes through the OutputParser of the model's chat format, which tells
thoughts from the answer (today's parsers call everything the answer).
Not here: the rendering (prompts.py), sampling parameters (sampling.py), the SSE lines (stream.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from fastapi import Request, Response
from msgspec import UNSET, UnsetType

from gnomon.engine.messages import TokenLogprobs
from gnomon.errors import GnomonError, RequestError
from gnomon.frontend.outputs import Delta
from gnomon.server.answer_types import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessageAnswer,
    PromptLogprobs,
    Usage,
)
from gnomon.server.body import read_model
from gnomon.server.envelope import Envelope
from gnomon.server.generation import Generation, Job
from gnomon.server.logprobs import chat_logprobs, prompt_logprobs
from gnomon.server.prompts import PreparedPrompt, conversation_prompt
from gnomon.server.request_types import ChatRequest
from gnomon.server.respond import respond, started
from gnomon.server.sampling import resolve_max_tokens, sampling_params
from gnomon.server.state import ServerState, request_id_of, state_of
from gnomon.server.streaming_options import UsageReport, interval_of, usage_report
from gnomon.text.parsing.base import ContentDelta, Event, OutputParser, ReasoningDelta


async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    state = state_of(request)
    body = await read_model(request, ChatRequest, state.settings.max_body_bytes)
    report = usage_report(body)
    job = await chat_job(state, body, request_id_of(request))
    generation = await started(state, job)
    writer = _ChatWriter(state, body, generation, report)
    return await respond(request, state, generation, writer, streams=bool(body.stream))


async def chat_job(state: ServerState, body: ChatRequest, request_id: str) -> Job:
    """Check a chat request as far as can be without running it."""
    state.check(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            "top_logprobs is given but logprobs is not true; send both",
            param="top_logprobs",
            code="invalid_value",
        )
    prompt = await conversation_prompt(state.engine, body, effort=body.reasoning_effort)
    info = state.engine.info
    max_tokens = resolve_max_tokens(body, len(prompt.token_ids), info.max_model_len, None)
    params = sampling_params(
        body,
        info.generation_defaults,
        max_tokens=max_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return Job(
        answer_id=f"chatcmpl-{body.request_id or request_id}",
        engine_id=state.engine_id(),
        prompts=[prompt],
        params=[params],
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        interval=interval_of(body, state.settings.stream_interval),
        user=body.user,
    )


@dataclass(slots=True)
class _Choice:
    """One choice as far as it has come."""

    parser: OutputParser
    has_begun: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """Keep what a delta brings, for the whole answer."""
        content, reasoning = self.parse(delta)
        self.content.append(content)
        self.reasoning.append(reasoning)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.last = delta

    def parse(self, delta: Delta) -> tuple[str, str]:
        """The answer's text and the thoughts' that a delta brings."""
        events: Iterable[Event] = self.parser.feed(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            events = [*events, *self.parser.finish()]
        content = reasoning = ""
        for event in events:
            if isinstance(event, ContentDelta):
                content += event.text
            elif isinstance(event, ReasoningDelta):
                reasoning += event.text
            else:
                raise GnomonError(f"{type(event).__name__} cannot be answered by this server")
        return content, reasoning


class _ChatWriter:
    """Makes the answer of one request, by either way."""

    def __init__(
        self, state: ServerState, body: ChatRequest, generation: Generation, report: UsageReport
    ) -> None:
        self._body = body
        self._generation = generation
        self._report = report
        self._tokenizer = state.engine.language.tokenizer
        self._model = state.model_name
        self._created = int(time.time())
        self._sends_ids = bool(body.return_token_ids)
        self._envelope: Envelope | None = None
        self._prompt_scores: PromptLogprobs | UnsetType = UNSET
        self._prompt: PreparedPrompt = generation.job.prompts[0]
        self._choices = [
            _Choice(
                state.engine.language.chat.parser(
                    starts_in_reasoning=self._prompt.starts_in_reasoning, tools=self._prompt.tools
                )
            )
            for _ in range(generation.job.params[0].n)
        ]

    def event(self, place: int, delta: Delta) -> bytes:
        """The event of a delta; the last one of a choice has its finish_reason."""
        choice = self._chunk_choice(self._choices[delta.index], delta)
        if self._envelope is None or self._report.always:
            usage = self._report.so_far(self._generation)
            if self._envelope is None and self._sends_ids:  # the prompt's come with the first event
                first = Envelope(self._chunk(usage, self._prompt.token_ids))
                self._envelope = Envelope(self._chunk(usage))
                return first.around(choice)
            self._envelope = Envelope(self._chunk(usage))
        return self._envelope.around(choice)

    def closing_event(self) -> bytes | None:
        """The usage, if wanted."""
        if not self._report.at_end:
            return None
        return msgspec.json.encode(self._chunk(self._generation.usage()))

    def _chunk(
        self, usage: Usage | UnsetType | None, prompt_ids: list[int] | UnsetType = UNSET
    ) -> ChatChunk:
        """An event without a choice."""
        return ChatChunk(
            id=self._generation.job.answer_id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage,
            prompt_token_ids=prompt_ids,
        )

    def add(self, place: int, delta: Delta) -> None:
        """Keep what a delta brings, for the whole answer."""
        self._choices[delta.index].add(delta)
        if delta.prompt_logprobs is not None:
            self._prompt_scores = prompt_logprobs(delta.prompt_logprobs, self._tokenizer)

    def answer(self) -> ChatAnswer:
        """The whole answer, of all that was added."""
        return ChatAnswer(
            id=self._generation.job.answer_id,
            created=self._created,
            model=self._model,
            choices=[self._whole(index, one) for index, one in enumerate(self._choices)],
            usage=self._generation.usage(),
            prompt_token_ids=self._prompt.token_ids if self._sends_ids else UNSET,
            prompt_logprobs=self._prompt_scores,
        )

    def _chunk_choice(self, choice: _Choice, delta: Delta) -> ChatChunkChoice:
        content, reasoning = choice.parse(delta)
        role: Literal["assistant"] | UnsetType = UNSET if choice.has_begun else "assistant"
        choice.has_begun = True
        scores = delta.logprobs if self._body.logprobs else None
        return ChatChunkChoice(
            delta.index,
            ChatDelta(role, content, reasoning or UNSET),
            None if scores is None else chat_logprobs(scores, self._tokenizer),
            delta.finish_reason,
            UNSET if delta.finish_reason is None else delta.stop_reason,
            list(delta.token_ids) if self._sends_ids else UNSET,
        )

    def _whole(self, index: int, choice: _Choice) -> ChatChoice:
        if choice.last is None or choice.last.finish_reason is None:
            raise GnomonError(f"choice {index} ended without a reason")
        return ChatChoice(
            index,
            ChatMessageAnswer(
                "assistant", "".join(choice.content), "".join(choice.reasoning) or UNSET
            ),
            chat_logprobs(choice.logprobs, self._tokenizer) if self._body.logprobs else None,
            choice.last.finish_reason,
            choice.last.stop_reason,
            choice.token_ids if self._sends_ids else UNSET,
        )
