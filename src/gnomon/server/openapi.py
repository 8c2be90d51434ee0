"""The OpenAPI page, made from the same types that the endpoints use.

In:  for each endpoint its request model (pydantic) and its answer (msgspec), or none.
Out: what FastAPI's routes need to describe them (`describe`), and all schemas (`components`).
The endpoints read their bodies by themselves, so FastAPI cannot derive these.
Not here: the routes (app.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gnomon.server import answer_types
from gnomon.server.errors import ErrorAnswer
from gnomon.server.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REF = "#/components/schemas/{}"
_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_ANSWERS = (
    answer_types.ChatAnswer,
    answer_types.ChatChunk,
    answer_types.CompletionAnswer,
    answer_types.ModelList,
    answer_types.ModelCard,
    answer_types.TokenizeAnswer,
    answer_types.DetokenizeAnswer,
    answer_types.RenderAnswer,
    ErrorAnswer,
)
_REFUSALS = {
    400: "The request is at fault; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    413: "The body is too long.",
    429: "The queue is full; ask again after Retry-After seconds.",
    500: "A defect of the server.",
    503: "The engine is dead, or the server is shutting down.",
}


def describe(
    body: type[BaseModel] | None = None,
    answer: type[msgspec.Struct] | None = None,
    events: type[msgspec.Struct] | None = None,
    refusals: tuple[int, ...] = (401, 503),
) -> dict[str, Any]:
    """The arguments of a route that describe it. A body brings the 4xx that bodies cause."""
    if body is not None:
        refusals = tuple(_REFUSALS)
    content: dict[str, Any] = {}
    if answer is not None:
        content["application/json"] = {"schema": _ref(answer)}
    if events is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": f"Events of {events.__name__}, [DONE]."}
        }
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "Done.", **({"content": content} if content else {})}
    }
    for status in refusals:
        responses[status] = {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": _ref(ErrorAnswer)}},
        }
    extra: dict[str, Any] = {}
    if body is not None:
        shown = {"application/json": {"schema": _ref(body)}}
        extra["requestBody"] = {"required": True, "content": shown}
    return {"responses": responses, "openapi_extra": extra}


def components() -> dict[str, Any]:
    """The schemas of all requests and answers by name."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _REQUESTS], ref_template=_REF.format("{model}")
    )
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF.format("{name}"))
    return {**schemas["$defs"], **answers}


def _ref(shape: type) -> dict[str, str]:
    return {"$ref": _REF.format(shape.__name__)}
