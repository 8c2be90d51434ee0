"""The request bodies of the API, one strict pydantic model per endpoint.

In:  the JSON body of a request (body.py parses it).
Out: a model whose fields have the right types and bounds; what depends on the tokenizer, the
     model or the chat format is checked later, where it is used.
Messages and tools stay decoded JSON: text/messages.py owns their rules, for every user of the
library alike; here they are only described, for the OpenAPI page.
Not here: the answers (answer_types.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from gnomon.engine.sampling_params import MAX_LOGPROBS
from gnomon.server.request_fields import (
    UNSUPPORTED,
    GenerationRequest,
    Refused,
    StrictModel,
    TokenId,
)

MAX_MESSAGES = 16_384
MAX_TOOLS = 1024
MAX_PROMPTS = 1024

_MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "description": "A message; assistants' may also have reasoning_content, tool_calls and "
        "prefix, tools' have tool_call_id.",
        "required": ["role"],
        "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
    },
}
_TOOLS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["function"],
                "properties": {
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string", "minLength": 1}},
                    },
                },
            },
        },
    ]
}


def _check_tool_choice(value: Any) -> Any:
    if value in (None, "none", "auto"):
        return value
    raise PydanticCustomError(
        UNSUPPORTED,
        "a call cannot be forced, because output is not constrained yet; allowed are none and auto",
    )


ToolChoice = Annotated[
    Literal["none", "auto"] | None,
    BeforeValidator(_check_tool_choice),
    Field(description="none leaves the tools out of the prompt; auto shows them to the model."),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConversationRequest(StrictModel):
    """What decides how a conversation is written as a prompt."""

    messages: list[dict[str, Any]] = Field(
        min_length=1, max_length=MAX_MESSAGES, json_schema_extra=_MESSAGES_SCHEMA
    )
    tools: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_TOOLS, json_schema_extra=_TOOLS_SCHEMA
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Options of the chat format: thinking, clear_thinking, ..."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Open the assistant's turn; true if not given."
    )
    continue_final_message: bool | None = Field(
        None, description="Leave the last message, an assistant's, open."
    )


class ChatRequest(ConversationRequest, GenerationRequest):
    """Body of /v1/chat/completions."""

    tool_choice: ToolChoice = None
    reasoning_effort: Effort | None = Field(None, description="As far as the model has efforts.")
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="The newer name of max_tokens."
    )
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="How many of the best tokens to report beside it; needs logprobs."
    )
    response_format: Annotated[
        None, Refused('output cannot be constrained; allowed is {"type": "text"}', {"type": "text"})
    ] = None

    parallel_tool_calls: Annotated[None, Refused("calls cannot be counted yet", True)] = None
    functions: Annotated[None, Refused("it is tools now")] = None
    function_call: Annotated[None, Refused("it is tool_choice now")] = None
    modalities: Annotated[None, Refused("the models here write text", ["text"])] = None
    audio: Annotated[None, Refused("the models here write text")] = None
    prediction: Annotated[None, Refused("predicted outputs are not supported")] = None
    web_search_options: Annotated[
        None, Refused("the server has no web search; offer it as a tool")
    ] = None
    verbosity: Annotated[None, Refused("say it in the system message", "medium")] = None
    echo: Annotated[None, Refused("use /v1/completions", False)] = None
    chat_template: Annotated[None, Refused("the model's own chat format is used")] = None
    documents: Annotated[None, Refused("put them into a message")] = None
    mm_processor_kwargs: Annotated[None, Refused("the models here read text")] = None
    add_special_tokens: Annotated[None, Refused("the chat format writes them", False)] = None
    include_reasoning: Annotated[None, Refused("thoughts are not told apart yet", True)] = None
    thinking: Annotated[None, Refused('send chat_template_kwargs: {"thinking": true}')] = None


def _shape_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<id_lists>"
    return "<texts>" if isinstance(first, str) else "<ids>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[list[TokenId], Field(min_length=1), Tag("<ids>")]
    | Annotated[
        list[list[TokenId]], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<id_lists>")
    ],
    Discriminator(_shape_of_prompt),
]


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Prompt = Field(description="A text, token ids, or a list of either.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Report so many of the best tokens, and the chosen one."
    )
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add its start token; true if not given."
    )

    suffix: Annotated[None, Refused("filling in the middle is not supported")] = None
    response_format: Annotated[
        None, Refused("output cannot be constrained yet", {"type": "text"})
    ] = None


class TokenizeRequest(StrictModel):
    """Body of /tokenize: a raw prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="true if not given.")
    return_token_strs: bool | None = None
    messages: list[dict[str, Any]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_MESSAGES,
        json_schema_extra={"anyOf": [{"type": "null"}, _MESSAGES_SCHEMA]},
    )
    tools: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_TOOLS, json_schema_extra=_TOOLS_SCHEMA
    )
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[None, Refused("the model's own chat format is used")] = None


class DetokenizeRequest(StrictModel):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = Field(None, description="false if not given.")
