"""The endpoints for text alone: /tokenize, /detokenize, and a chat request's prompt unrun.

In:  TokenizeRequest, DetokenizeRequest, ChatRequest.
Out: token ids, text, the rendered prompt with its ids.
Not here: generation.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response
from msgspec import UNSET

from gnomon.errors import RequestError
from gnomon.server.answer_types import DetokenizeAnswer, RenderAnswer, TokenizeAnswer
from gnomon.server.body import read_model
from gnomon.server.chat import chat_job
from gnomon.server.prompts import conversation_prompt
from gnomon.server.request_types import (
    ChatRequest,
    ConversationRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gnomon.server.state import ServerState, request_id_of, state_of

_CONVERSATION_ONLY = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_PROMPT_ONLY = ("add_special_tokens",)


async def tokenize(request: Request) -> Response:
    """The ids of a raw prompt or of a conversation."""
    state = state_of(request)
    body = await read_model(request, TokenizeRequest, state.settings.max_body_bytes)
    state.check_model(body.model)
    tokens = await _ids(state, body)
    tokenizer = state.engine.language.tokenizer
    strings = [tokenizer.id_to_token(index) or "" for index in tokens]
    answer = TokenizeAnswer(
        len(tokens),
        state.engine.info.max_model_len,
        tokens,
        strings if body.return_token_strs else UNSET,
    )
    return _json(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body = await read_model(request, DetokenizeRequest, state.settings.max_body_bytes)
    state.check_model(body.model)
    size = state.engine.info.vocab_size
    wrong = next((index for index in body.tokens if index >= size), None)
    if wrong is not None:
        raise RequestError(
            f"tokens holds {wrong}; this model has ids 0 to {size - 1}",
            param="tokens",
            code="invalid_value",
        )
    text = state.engine.language.tokenizer.decode(
        body.tokens, skip_special_tokens=bool(body.skip_special_tokens)
    )
    return _json(DetokenizeAnswer(text))


async def render(request: Request) -> Response:
    """What a chat request would feed to the model; the request is checked in full and not run."""
    state = state_of(request)
    body = await read_model(request, ChatRequest, state.settings.max_body_bytes)
    job = await chat_job(state, body, request_id_of(request))
    prompt, params = job.prompts[0], job.params[0]
    params.validate(state.engine.info.vocab_size)
    return _json(
        RenderAnswer(
            prompt.text or "",
            prompt.token_ids,
            prompt.starts_in_reasoning,
            params.max_tokens or 0,
        )
    )


async def _ids(state: ServerState, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(
            "send either prompt or messages", param="prompt", code="missing_parameter"
        )
    foreign = _PROMPT_ONLY if body.prompt is None else _CONVERSATION_ONLY
    for name in foreign:
        if getattr(body, name) is not None:
            other = "messages" if body.prompt is None else "prompt"
            raise RequestError(
                f"{name} does not go with {other}; leave it out", param=name, code="invalid_value"
            )
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        return state.engine.language.tokenizer.encode_with_specials(
            body.prompt, add_special_tokens=adds
        )
    conversation = ConversationRequest(
        messages=body.messages or [],
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return (await conversation_prompt(state.engine, conversation)).token_ids


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
