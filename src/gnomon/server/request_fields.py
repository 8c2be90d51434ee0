"""The parameters that chat and text completions share, as strict pydantic fields.

In:  the JSON body of a request.
Out: `GenerationRequest`, the base of the two request models. Unknown names are refused; `null`
     means "not given" everywhere. A known OpenAI or vLLM parameter that this server cannot honour
     is declared with `Refused(...)`: any value but null is an error that says what to do instead.
Bounds stand here for the OpenAPI page and for errors that name the field; SamplingParams has the
last word (a test holds the two together).
Not here: messages (text/messages.py checks them), reading of the body (body.py).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from gnomon.engine.sampling_params import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_SALT_CHARACTERS = 256
UNSUPPORTED = "unsupported_parameter"


class StrictModel(BaseModel):
    """No coercion, no unknown names, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Refused:
    """Marks a parameter that is known and not supported; `neutral` values change nothing."""

    def __init__(self, why: str, *neutral: object) -> None:
        self._why = why
        self._neutral = neutral

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"description": f"Not supported: {self._why}.", "enum": [None, *self._neutral]}

    def _check(self, value: Any) -> None:
        if value is not None and not any(_is_same(value, kept) for kept in self._neutral):
            raise PydanticCustomError(UNSUPPORTED, "{why}", {"why": self._why})


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other


def _bounded(description: str, low: float, high: float | None, **more: Any) -> FieldInfo:
    info: FieldInfo = Field(description=description, ge=low, le=high, **more)
    return info


def _shape_of(value: Any) -> str:
    return "<many>" if isinstance(value, list) else "<one>"


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[
    Annotated[StopString, Tag("<one>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<many>")],
    Discriminator(_shape_of),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(StrictModel):
    """What a stream reports beside the text."""

    include_usage: bool | None = Field(None, description="A last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="The usage so far in every chunk; needs include_usage."
    )


class GenerationRequest(StrictModel):
    """Parameters of both kinds of completion. None: not given."""

    model: str | None = Field(None, description="A name of /v1/models; optional.")
    stream: bool | None = Field(None, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = None
    n: Annotated[int, _bounded("Choices per prompt.", 1, MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, _bounded("Most new tokens.", 1, 2**31 - 1)] | None = None
    min_tokens: Annotated[int, _bounded("New tokens before an end.", 0, 2**31 - 1)] | None = None
    temperature: Annotated[float, _bounded("0 is greedy.", 0, 2)] | None = None
    top_p: Annotated[float, Field(description="Nucleus mass.", gt=0, le=1)] | None = None
    top_k: Annotated[int, _bounded("0 or -1: off.", -1, 2**31 - 1)] | None = None
    min_p: Annotated[float, _bounded("Relative to the best token.", 0, 1)] | None = None
    presence_penalty: Annotated[float, _bounded("Once per token.", -2, 2)] | None = None
    frequency_penalty: Annotated[float, _bounded("Per occurrence.", -2, 2)] | None = None
    repetition_penalty: Annotated[float, Field(description="1 is off.", gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None,
        description="Token id to bias.",
        max_length=MAX_LOGIT_BIASES,
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    )
    seed: Annotated[int, _bounded("int64.", -(2**63), 2**63 - 1)] | None = None
    stop: Stops | None = Field(None, description="One string, or a list of them.")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="true if not given.")
    prompt_logprobs: Annotated[int, _bounded("Best tokens.", 0, MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = Field(None, description="Adds the ids to the answer.")
    priority: Annotated[int, _bounded("Lower runs first.", -(2**31), 2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = Field(
        None, description="Requests of different salts share no cached prefix."
    )
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = Field(
        None, description="Becomes part of the answer's id."
    )
    user: str | None = Field(None, max_length=256, description="Noted in the server's log.")

    best_of: Annotated[None, Refused("ask for n choices and pick one", 1)] = None
    use_beam_search: Annotated[None, Refused("beam search does not exist here; sample", False)] = (
        None
    )
    length_penalty: Annotated[None, Refused("it belongs to beam search", 1, 1.0)] = None
    metadata: Annotated[None, Refused("nothing is stored; keep it on your side", {})] = None
    store: Annotated[None, Refused("nothing is stored", False)] = None
    service_tier: Annotated[None, Refused("there is one tier", "auto", "default")] = None
    safety_identifier: Annotated[None, Refused("send user, which is noted in the log")] = None
    prompt_cache_key: Annotated[
        None, Refused("prefixes are found by content; cache_salt keeps them apart")
    ] = None
    prompt_cache_retention: Annotated[
        None, Refused("cached prefixes stay as long as there is room")
    ] = None
    structured_outputs: Annotated[
        None, Refused("output cannot be constrained yet; check it on your side")
    ] = None
    guided_json: Annotated[None, Refused("output cannot be constrained yet")] = None
    guided_regex: Annotated[None, Refused("output cannot be constrained yet")] = None
    guided_choice: Annotated[None, Refused("output cannot be constrained yet")] = None
    guided_grammar: Annotated[None, Refused("output cannot be constrained yet")] = None
    logits_processors: Annotated[None, Refused("no code runs for a request; logit_bias exists")] = (
        None
    )
    allowed_token_ids: Annotated[None, Refused("use logit_bias")] = None
    bad_words: Annotated[None, Refused("use logit_bias with -100")] = None
    truncate_prompt_tokens: Annotated[None, Refused("shorten the prompt on your side")] = None
    spaces_between_special_tokens: Annotated[None, Refused("none are added", False)] = None
    kv_transfer_params: Annotated[None, Refused("this server computes prompts itself")] = None
    lora_request: Annotated[None, Refused("adapters are not supported")] = None
