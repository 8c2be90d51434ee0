"""AsyncLLM: the engine in its own process, for asyncio: what the server stands on.

In:  prompts as token ids (`start`), or as text, ids or chat messages (`generate`).
Out: an async iterator of Deltas over all choices. Closing it, or dropping it, aborts the choices
     that still run; nothing of them is left in the engine.
Errors: `start` raises RequestError, OverloadError or EngineDeadError before the first delta. Later
the iterator raises EngineDeadError if the engine dies; a request that fails alone ends with a Delta
whose finish_reason is "error".
Start-up blocks (`AsyncLLM(config)`); call it before the event loop or in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from gnomon.engine.client import ProcessClient
from gnomon.engine.config import EngineConfig
from gnomon.engine.launch import EngineProcess
from gnomon.engine.messages import EngineRequest, EngineStats, joined
from gnomon.engine.process_stream import ProcessStream
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.wire import EngineInfo
from gnomon.errors import RequestError, UnsupportedError
from gnomon.frontend.choices import ChoiceSet
from gnomon.frontend.language import language_of
from gnomon.frontend.outputs import Delta
from gnomon.frontend.prompts import TOKEN_IDS_ONLY
from gnomon.text.encodings.base import ChatEncoding, ChatOptions
from gnomon.text.language import Language
from gnomon.text.tokenizer import Tokenizer

THREAD_CHARACTERS = 8192
"""Longer texts are tokenised in a thread: 8,192 characters take about a millisecond."""


class AsyncLLM:
    """A running engine process and the language of its model."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Start the engine and wait until it is ready. `progress(stage, done, total)`."""
        self.config = config or EngineConfig()
        self._language = language_of(self.config)
        size = None if self._language is None else self._language.tokenizer.vocab_size
        self.client = ProcessClient(EngineProcess(self.config, progress, default_vocab_size=size))

    @property
    def info(self) -> EngineInfo:
        """What the engine is: model, limits, resolved configuration, operators."""
        return self.client.info

    @property
    def language(self) -> Language:
        """Tokenizer and chat encoding; UnsupportedError with tokenizer="none"."""
        if self._language is None:
            raise UnsupportedError(TOKEN_IDS_ONLY)
        return self._language

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.language.tokenizer

    @property
    def encoding(self) -> ChatEncoding | None:
        """The model's chat encoding, or None if it has none."""
        return self.language.encoding

    @property
    def is_healthy(self) -> bool:
        """Whether the engine lives and takes requests."""
        return self.client.is_healthy

    @property
    def death(self) -> str | None:
        """Why the engine died, with the step that it was in; None while it lives."""
        return self.client.death

    def stats(self) -> EngineStats:
        """The engine's counters after its last step."""
        return self.client.stats()

    def attach(self) -> None:
        """Listen in the running event loop, so that a death is seen while nothing runs."""
        self.client.attach()

    async def start(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        interval: int = 1,
    ) -> DeltaIterator:
        """Queue a request. What is wrong with it is raised here, before the first Delta.

        interval: tokens of a choice that come together, about; the first and the end never wait.
        """
        self.attach()
        ends = self.info.eos_token_ids
        if self._language is not None:
            ends = tuple(dict.fromkeys((*ends, *self._language.stop_ids)))
        elif params.stop:
            raise RequestError(f"stop strings need text, but {TOKEN_IDS_ONLY}", param="stop")
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=time.monotonic(),
            eos_token_ids=ends,
        )
        request.validate(self.info.vocab_size, self.info.max_model_len)
        choices = ChoiceSet(request, None if self._language is None else self._language.tokenizer)
        return DeltaIterator(self.client, choices, self.client.submit(choices.requests, interval))

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: ChatOptions | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        """Deltas for a raw text, token ids or chat messages (with their ChatOptions)."""
        ids = await self.encode(prompt, options)
        deltas = await self.start(
            ids,
            params or SamplingParams(),
            request_id=request_id or uuid.uuid4().hex,
            priority=priority,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def encode(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        options: ChatOptions | None = None,
    ) -> list[int]:
        """Token ids of a raw text, of chat messages, or the ids themselves."""
        if isinstance(prompt, str):
            return await _off_loop(len(prompt), self.tokenizer.encode_with_specials, prompt)
        if prompt and isinstance(prompt[0], Mapping):
            messages = [message for message in prompt if isinstance(message, Mapping)]
            rendered = self.language.chat.render(messages, options=options)
            size = len(rendered.text)
            return await _off_loop(size, self.tokenizer.encode_segments, rendered.segments)
        return [index for index in prompt if isinstance(index, int)]

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages that no request holds."""
        self.attach()
        self.client.reset_prefix_cache()

    async def drain(self, deadline_s: float | None = None) -> None:
        """No new requests; wait for the running ones, `deadline_s` at most (None: the flag's)."""
        self.attach()
        await self.client.drain(self.info.drain_timeout_s if deadline_s is None else deadline_s)

    def close(self) -> None:
        """End the engine process; what runs raises EngineDeadError. Idempotent."""
        self.client.close()

    async def __aenter__(self) -> Self:
        self.attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class DeltaIterator:
    """The Deltas of one client request; `aclose` (or being dropped) aborts what still runs."""

    def __init__(self, client: ProcessClient, choices: ChoiceSet, stream: ProcessStream) -> None:
        self._client = client
        self._choices = choices
        self._stream = stream
        self._ready: deque[Delta] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._ready:
            self._ready.extend(await self.arrived())
            if not self._ready:
                raise StopAsyncIteration
        return self._ready.popleft()

    async def arrived(self) -> list[Delta]:
        """All that has come since the last look, one Delta per choice; none when all have ended.

        Waits for the first one only: a reader that is late gets several tokens in one Delta.
        """
        if self._ready:
            ready, self._ready = self._ready, deque()
            return list(ready)
        choices, stream = self._choices, self._stream
        found: list[Delta] = []
        while not found and choices.has_open and stream.has_more and not self._is_closed:
            arrived = stream.take()
            if not arrived:
                await stream.arrival()
            for delta in joined(arrived):
                made, must_abort = choices.feed(delta)
                if must_abort:
                    self._client.abort([delta.request_id])
                if made is not None:
                    found.append(made)
        return found

    async def aclose(self) -> None:
        """Abort the choices that still run. Idempotent."""
        self._is_closed = True
        self._client.abort(self._choices.open_ids)

    def __del__(self) -> None:
        ids = self._choices.open_ids
        if ids and not self._is_closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._client.abort, ids)


async def _off_loop(size: int, encode: Callable[[Any], list[int]], value: Any) -> list[int]:
    """encode(value), in a thread if the text is long."""
    if size < THREAD_CHARACTERS:
        return encode(value)
    return await asyncio.to_thread(encode, value)
