"""Every failure in OpenAI's shape: {"error": {message, type, param, code}}, and its HTTP status.

In:  an exception; a pydantic error with the body that caused it.
Out: `Problem` (status, body, headers), a Response, or the object that goes into a running stream.
What is not a GnomonError is a defect: the client learns no more than that, the log gets the trace.
Not here: when to refuse (gate.py, body.py and the endpoints), the exception classes (errors.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
from fastapi import Response

from gnomon.errors import (
    EngineDeadError,
    GnomonError,
    OverloadError,
    RequestError,
    UnsupportedError,
)
from gnomon.server.request_fields import UNSUPPORTED


class ErrorDetail(msgspec.Struct, frozen=True):
    """`type` is the family, `code` the exact word; `param` the dotted name of the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Problem:
    """An error, ready to be sent. `retry_after_s` becomes the Retry-After header."""

    status: int
    detail: ErrorDetail
    retry_after_s: int | None = None

    def body(self) -> bytes:
        """The JSON of the answer."""
        return msgspec.json.encode(ErrorAnswer(self.detail))

    def response(self) -> Response:
        """The whole answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")


_TYPE_OF_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def problem_of(error: Exception) -> Problem:
    """The problem that an exception is for the client."""
    message = str(error)
    if isinstance(error, RequestError):
        kind = _TYPE_OF_STATUS.get(error.status, "invalid_request_error")
        return Problem(error.status, ErrorDetail(message, kind, error.param, error.code))
    if isinstance(error, UnsupportedError):
        return Problem(400, ErrorDetail(message, "invalid_request_error", None, UNSUPPORTED))
    if isinstance(error, OverloadError):
        wait_s = max(1, math.ceil(error.retry_after_s))
        return Problem(429, ErrorDetail(message, "rate_limit_error", None, "queue_full"), wait_s)
    if isinstance(error, EngineDeadError):
        return Problem(503, ErrorDetail(message, "service_unavailable", None, "engine_dead"))
    if isinstance(error, GnomonError):
        return Problem(500, ErrorDetail(message, "server_error", None, "internal_error"))
    hint = "an error inside the server; its log has the details under this X-Request-Id"
    return Problem(500, ErrorDetail(hint, "server_error", None, "internal_error"))


def draining_problem() -> Problem:
    """What a new request gets while the server is going down."""
    message = "the server is shutting down and takes no new requests; ask another one, or retry"
    return Problem(503, ErrorDetail(message, "service_unavailable", None, "draining"), 5)
