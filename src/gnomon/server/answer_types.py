"""The answers of the API as msgspec structs: quick to encode, and described by themselves.

Out: the structs. A field that is UNSET is left out of the JSON; None is written as null.
Beside OpenAI's fields: `stop_reason` (the stop string or token id that ended a choice), token ids
and prompt log-probabilities if asked for (vLLM's names), cache hit and miss counts in the usage
(DeepSeek's names).
Not here: how they are filled (chat.py, completions.py, logprobs.py), requests, errors.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Reason = Literal["stop", "length", "tool_calls", "abort", "error"]


class PromptTokensDetails(Struct, frozen=True):
    """Prompt tokens whose cache was already there."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of one request, over all its prompts and choices; hits + misses = prompt tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int


class TopLogprob(Struct, frozen=True):
    """One of the best tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct, frozen=True):
    """The token chosen at a place, and the best ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Of the tokens of one choice or of one chunk of it."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """The same in the older, columnar shape."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, frozen=True):
    """One token at a place of the prompt; rank 1 is the best."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatMessageAnswer(Struct, frozen=True):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One whole choice."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, frozen=True, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    """What is new: the role in the first chunk of a choice, then text."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A part of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a chat stream. `usage` is null until the last one, if asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True):
    """One choice, whole or, with `finish_reason` null, a part of its text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(Struct, frozen=True, kw_only=True):
    """A whole answer or, in a stream, one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "gnomon"
    root: str
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(Struct, frozen=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeAnswer(Struct, frozen=True):
    """Answer of /detokenize."""

    prompt: str


class RenderAnswer(Struct, frozen=True):
    """`prompt` is for the eye: special tokens and text that spells them look alike in it."""

    prompt: str
    prompt_token_ids: list[int]
    starts_in_reasoning: bool
    max_tokens: int
