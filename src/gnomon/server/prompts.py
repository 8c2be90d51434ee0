"""Prompts of requests as token ids.

In:  conversations and raw prompts, as the request models hold them.
Out: `PreparedPrompt`: token ids, and for a conversation where its answer starts.
Long texts are tokenized in a thread, so that other streams go on meanwhile.
Errors: RequestError for what cannot be written or encoded, and for an empty prompt.
Not here: the formats (gnomon.text), the length of the context (sampling.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gnomon.errors import RequestError
from gnomon.server.engine_port import EnginePort
from gnomon.server.request_types import ChatRequest, CompletionRequest, ConversationRequest
from gnomon.text.encodings.base import chat_options
from gnomon.text.messages import Tool, parse_tools

LONG_TEXT = 20_000  # characters; below, a thread costs more than it saves
MESSAGE_LENGTH = 200
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Token ids, the prompt as text where it is known already, and what the answer begins with."""

    token_ids: list[int]
    text: str | None = None
    starts_in_reasoning: bool = False
    tools: tuple[Tool, ...] = ()


async def conversation_prompt(
    engine: EnginePort, request: ConversationRequest, *, effort: str | None = None
) -> PreparedPrompt:
    """Render a conversation in the model's own format and encode it."""
    shows_tools = not (isinstance(request, ChatRequest) and request.tool_choice == "none")
    tools = request.tools if shows_tools else None
    options = chat_options(
        request.chat_template_kwargs,
        reasoning_effort=effort,
        add_generation_prompt=request.add_generation_prompt is not False
        and not request.continue_final_message,
        continue_final_message=bool(request.continue_final_message),
    )
    if request.add_generation_prompt and request.continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true: an answer either "
            "begins or goes on; send one of them",
            param="continue_final_message",
            code="invalid_value",
        )

    def prepare() -> PreparedPrompt:
        rendered = engine.language.chat.render(request.messages, tools=tools, options=options)
        ids = engine.language.tokenizer.encode_segments(rendered.segments)
        return PreparedPrompt(ids, rendered.text, rendered.starts_in_reasoning, parse_tools(tools))

    return await _off_loop(prepare, _length_of(request.messages))


async def raw_prompts(engine: EnginePort, request: CompletionRequest) -> list[PreparedPrompt]:
    """The prompts of a text completion, each of its own; none may be empty."""
    prompt = request.prompt
    adds = request.add_special_tokens is not False
    if isinstance(prompt, str):
        entries: Sequence[str | list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        entries = [prompt]
    else:
        entries = prompt  # type: ignore[assignment]  # several texts, or several lists of ids

    def prepare() -> list[PreparedPrompt]:
        return [_raw_prompt(engine, entry, adds) for entry in entries]

    length = sum(len(entry) for entry in entries if isinstance(entry, str))
    prepared = await _off_loop(prepare, length)
    for place, one in enumerate(prepared):
        if not one.token_ids:
            param = "prompt" if len(prepared) == 1 else f"prompt.{place}"
            raise RequestError(
                f"{param} is empty; it must hold at least one token",
                param=param,
                code="empty_prompt",
            )
    return prepared


def _raw_prompt(engine: EnginePort, entry: str | list[int], adds: bool) -> PreparedPrompt:
    if not isinstance(entry, str):
        return PreparedPrompt(entry)
    if not entry:  # not even where the tokenizer would add a start token: nothing was asked
        return PreparedPrompt([])
    ids = engine.language.tokenizer.encode_with_specials(entry, add_special_tokens=adds)
    return PreparedPrompt(ids, entry)


async def _off_loop(work: Callable[[], Result], num_characters: int) -> Result:
    return work() if num_characters < LONG_TEXT else await asyncio.to_thread(work)


def _length_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """About how many characters the messages hold: lists of parts count as long.

    A message counts by itself, because a template may look at all of them for each.
    """
    contents = [message.get("content") for message in messages]
    lengths = (len(text) if isinstance(text, str) else LONG_TEXT for text in contents if text)
    return sum(lengths) + MESSAGE_LENGTH * len(messages)
