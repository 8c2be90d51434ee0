"""From the parameters of a request to SamplingParams.

In:  a checked request, the defaults of the model's generation_config.json, the room that is left.
Out: SamplingParams. What the request does not say comes from the model's own defaults, then from
     SamplingParams; `max_tokens` from the kind of endpoint.
Errors: RequestError that names the field as the client spelt it.
Not here: bounds (SamplingParams), ids against the vocabulary (the engine, when a request starts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import RequestError
from gnomon.server.request_fields import GenerationRequest
from gnomon.server.request_types import ChatRequest

COMPLETION_MAX_TOKENS = 16  # what OpenAI's and vLLM's text completions take when nothing is said
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FROM_REQUEST = (
    *_FROM_MODEL,
    "n",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)


def sampling_params(
    request: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    num_logprobs: int | None,
) -> SamplingParams:
    """The sampling wishes of a request, all of them."""
    chosen = {name: defaults[name] for name in _FROM_MODEL if defaults.get(name) is not None}
    for name in _FROM_REQUEST:
        value = getattr(request, name)
        if value is not None:
            chosen[name] = value
    if request.logit_bias:
        chosen["logit_bias"] = request.logit_bias
    return SamplingParams(max_tokens=max_tokens, logprobs=num_logprobs, **chosen)


def wanted_tokens(request: GenerationRequest) -> tuple[int | None, str]:
    """How many new tokens a request asks for at most, and which field says so."""
    newer = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    if newer is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens not in (None, newer):
        raise RequestError(
            f"max_tokens is {request.max_tokens} and max_completion_tokens is {newer}; they mean "
            "the same, send one of them",
            param="max_completion_tokens",
            code="invalid_value",
        )
    return newer, "max_completion_tokens"


def resolve_max_tokens(
    request: GenerationRequest, num_prompt_tokens: int, max_model_len: int, default: int | None
) -> int:
    """New tokens that fit: as wanted, else the default, else all that the context has left.

    RequestError `context_length_exceeded` if the prompt leaves no room for what is wanted.
    """
    wanted, field = wanted_tokens(request)
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, but the context of this model holds "
            f"{max_model_len}, one of them new; shorten the prompt by {1 - room} tokens",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and {field} is {wanted}, together "
            f"{num_prompt_tokens + wanted}, but the context of this model holds {max_model_len}; "
            f"shorten the prompt or ask for at most {room} tokens",
            param=field,
            code="context_length_exceeded",
        )
    return wanted
