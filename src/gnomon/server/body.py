"""From the bytes of a request to its checked model, or to a RequestError that names the field.

In:  a request whose body has not been read; the pydantic model of the endpoint.
Out: an instance of the model.
Errors: 413 beyond the size limit; 400 for invalid UTF-8 or JSON, for more than 200 levels of
nesting, and for the first field at fault: the message says name, value and what is allowed.
The content type is not asked for: curl sends a wrong one by default.
Not here: what the fields mean.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gnomon.errors import RequestError
from gnomon.server.request_fields import UNSUPPORTED

Model = TypeVar("Model", bound=BaseModel)

_MAX_SHOWN = 80  # characters of a wrong value that a message repeats


async def read_model(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Read and check the body of a request."""
    return parse_model(await read_body(request, max_bytes), model)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, or RequestError 413 as soon as it is known to be too long."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > max_bytes:
            raise _too_long(max_bytes)
    return bytes(received)


def parse_model(body: bytes, model: type[Model]) -> Model:
    """Check a body against a model."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error, body, model) from None


def _too_long(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is longer than {max_bytes} bytes; send less, or start the server with a larger "
        "--max-body-bytes",
        code="request_too_large",
        status=413,
    )


def _request_error(error: ValidationError, body: bytes, model: type[BaseModel]) -> RequestError:
    """The first fault of a body that pydantic refused."""
    faults = error.errors(include_url=False, include_context=True)
    fault = faults[0]
    kind = fault["type"]
    if kind == "json_invalid":
        return RequestError(_json_message(fault, body), code="invalid_json")
    if kind == "model_type" and not fault["loc"]:
        return RequestError("the body has to be a JSON object", code="invalid_type")
    path = _path(fault["loc"], json.loads(body), kind)
    param = ".".join(path)
    if kind == UNSUPPORTED:
        message = f"{param} is not supported: {fault['msg']}"
        return RequestError(message, param=param, code=UNSUPPORTED)
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], model.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see /openapi.json for those that exist"
        return RequestError(
            f"unknown parameter {param!r}; {hint}", param=param, code="unknown_parameter"
        )
    if kind == "missing":
        return RequestError(f"{param} is missing", param=param, code="missing_parameter")
    more = f" ({len(faults) - 1} more fields are at fault)" if len(faults) > 1 else ""
    allowed = fault["msg"][:1].lower() + fault["msg"][1:]
    shown = _shown(fault["input"])
    return RequestError(f"{param} is {shown}: {allowed}{more}", param=param, code="invalid_value")


def _json_message(fault: ErrorDetails, body: bytes) -> str:
    if not body:
        return "the body is empty; a JSON object is expected"
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return f"the body is not valid UTF-8: {wrong.reason} at byte {wrong.start}"
    reason = str(fault.get("ctx", {}).get("error", "not JSON"))
    if "recursion limit" in reason:
        return "the body nests more than 200 levels of lists and objects; flatten it"
    return f"the body is not valid JSON: {reason}"


def _path(location: Iterable[int | str], value: Any, kind: str) -> list[str]:
    """The dotted path of a fault: its location without the tags of unions, "<text>" etc."""
    path: list[str] = []
    items = [item for item in location if not str(item).startswith("<")]
    for place, item in enumerate(items):
        if isinstance(item, int):
            path.append(str(item))
            value = value[item] if isinstance(value, list) and item < len(value) else None
        elif isinstance(value, dict) and item in value:
            path.append(item)
            value = value[item]
        elif place == len(items) - 1 and kind == "missing":
            path.append(item)
    return path or [str(items[0]) if items else "body"]


def _shown(value: Any) -> str:
    if isinstance(value, dict | list) and len(value) > 8:
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
