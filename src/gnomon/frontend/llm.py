"""LLM: offline use in one process, in the shape that vLLM's users know.

In:  a model and engine flags by name; prompts (texts, token ids) or chat messages; SamplingParams.
Out: `generate` and `chat` return one RequestOutput per prompt, in the order of the prompts.
The engine runs in this process and is not shared between threads. For a server, or for asyncio,
there is AsyncLLM.
Defaults: SamplingParams without max_tokens generates 16 tokens, as vLLM does offline. Requests are
numbered from 0 in the order they come, and the engine's seed makes a run repeatable.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore, build_core
from gnomon.engine.messages import EngineRequest, EngineStats
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import OverloadError, RequestError, UnsupportedError
from gnomon.frontend.choices import ChoiceSet
from gnomon.frontend.language import language_of
from gnomon.frontend.outputs import CompletionOutput, RequestOutput
from gnomon.frontend.progress import progress_bar
from gnomon.frontend.prompts import TOKEN_IDS_ONLY, Prompt, read_prompts
from gnomon.text.encodings.base import ChatOptions
from gnomon.text.language import Language
from gnomon.text.tokenizer import Tokenizer

OFFLINE_MAX_TOKENS = 16

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to generate. Every engine flag is a keyword argument (engine/config.py)."""

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        **flags: Any,
    ) -> None:
        """Load a model. `progress(stage, done, total)` is called while weights load.

        ConfigError names an unknown flag and the nearest known one.
        """
        self.config = EngineConfig.of(model=model, **flags)
        self._language = language_of(self.config)
        size = None if self._language is None else self._language.tokenizer.vocab_size
        self.core: EngineCore = build_core(self.config, progress, size)
        self._num_requests = 0

    @property
    def language(self) -> Language:
        """Tokenizer and chat encoding; UnsupportedError with tokenizer="none"."""
        if self._language is None:
            raise UnsupportedError(TOKEN_IDS_ONLY)
        return self._language

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.language.tokenizer

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.core.stats()

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts (prompts.py says in which shapes).

        sampling_params: one for all, or one per prompt. use_tqdm: a progress bar on a terminal.
        priority: one per prompt, lower first, with scheduling_policy="priority".
        cache_salt: prompts of different salts share no cached pages.
        RequestError if any prompt or parameter is refused; then nothing has been generated.
        """
        tokenizer = None if self._language is None else self._language.tokenizer
        read = read_prompts(prompts, tokenizer)
        params = _per_prompt(sampling_params, len(read))
        order = _priorities(priority, len(read), self.config)
        sets = [
            self._choices(prompt, one, rank, cache_salt)
            for prompt, one, rank in zip(read, params, order, strict=True)
        ]
        outputs = [
            RequestOutput(
                request_id=choices.request_id,
                prompt=prompt.text,
                prompt_token_ids=prompt.token_ids,
                outputs=[CompletionOutput(index) for index in range(one.n)],
            )
            for choices, prompt, one in zip(sets, read, params, strict=True)
        ]
        with progress_bar("prompts", len(outputs), is_wanted=use_tqdm) as advance:
            self._run(sets, outputs, advance)
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: ChatOptions | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them.

        messages: OpenAI's shape. tools: OpenAI's shape. options: how the prompt is written
        (thinking, effort, an open last message); None takes the encoding's defaults.
        """
        language = self.language
        prompts = []
        for conversation in _conversations(messages):
            rendered = language.chat.render(conversation, tools=tools, options=options)
            prompts.append(language.tokenizer.encode_segments(rendered.segments))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _choices(
        self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str
    ) -> ChoiceSet:
        if params.max_tokens is None:
            limit = max(OFFLINE_MAX_TOKENS, params.min_tokens)
            params = msgspec.structs.replace(params, max_tokens=limit)
        ends = self.core.info.eos_token_ids
        if self._language is not None:
            ends = tuple(dict.fromkeys((*ends, *self._language.stop_ids)))
        if self._language is None and params.stop:
            raise RequestError(f"stop strings need text, but {TOKEN_IDS_ONLY}", param="stop")
        request = EngineRequest(
            request_id=str(self._num_requests),
            prompt_token_ids=prompt.token_ids,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=time.monotonic(),
            eos_token_ids=ends,
        )
        request.validate(self.core.info.vocab_size, self.core.info.max_model_len)
        self._num_requests += 1
        tokenizer = None if self._language is None else self._language.tokenizer
        return ChoiceSet(request, tokenizer)

    def _run(
        self, sets: list[ChoiceSet], outputs: list[RequestOutput], advance: Callable[[int], None]
    ) -> None:
        """Run until every choice has ended; on any error nothing is left in the engine."""
        core = self.core
        waiting = deque(sets)
        owner = {
            request.request_id: (choices, output)
            for choices, output in zip(sets, outputs, strict=True)
            for request in choices.requests
        }
        try:
            while waiting or core.has_work:
                self._admit(waiting)
                for delta in core.step():
                    choices, output = owner[delta.request_id]
                    made, must_abort = choices.feed(delta)
                    if must_abort:
                        core.abort([delta.request_id])
                    if made is not None:
                        output.add(made)
                        advance(int(made.finish_reason is not None and output.is_finished))
        except BaseException:  # KeyboardInterrupt too: the next call must find an idle engine
            core.abort_all()
            raise

    def _admit(self, waiting: deque[ChoiceSet]) -> None:
        """Queue what the engine has room for; the rest is offered again after the next step."""
        while waiting:
            try:
                self.core.add(waiting[0].requests)
            except OverloadError:
                if not self.core.has_work:
                    raise
                return
            waiting.popleft()


def _per_prompt(params: Params, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(
            f"there are {len(params)} sampling_params for {num_prompts} prompts; give one for all, "
            "or one for each",
            param="sampling_params",
        )
    return list(params)


def _priorities(
    priority: Sequence[int] | None, num_prompts: int, config: EngineConfig
) -> Sequence[int]:
    if priority is None:
        return [0] * num_prompts
    if config.scheduling_policy != "priority" or len(priority) != num_prompts:
        raise RequestError(
            f"{len(priority)} priorities for {num_prompts} prompts with scheduling_policy "
            f"{config.scheduling_policy!r}; give one for each, and scheduling_policy='priority'",
            param="priority",
        )
    return priority


def _conversations(messages: Any) -> Sequence[Messages]:
    """The conversations of one, or of a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(
            f"messages are of type {type(messages).__name__}; a list of messages, or a list of "
            "such lists, is needed",
            param="messages",
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else messages
