"""What happens to every request before an endpoint sees it, and to every answer after.

In:  an ASGI app.
Out: the same app behind a gate: it has an X-Request-Id, taken from the client or new, that comes
     back with the answer; without the right key it gets no further than the probes; while the
     server drains nothing but the probes is answered; an exception that nobody expected becomes a
     500 in OpenAI's shape and a trace in the log.
Keys are compared by their SHA-256 in constant time, against all of them.
Not here: the length of bodies (body.py), what the endpoints refuse.
"""

from __future__ import annotations

import hashlib
import hmac
import logging

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gnomon.errors import RequestError
from gnomon.server.errors import Problem, draining_problem, problem_of
from gnomon.server.state import ServerState, accepted_request_id
from gnomon.server.stream import CLIENT_LEFT

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})


class Gate:
    """The only middleware. Plain ASGI, so that a stream passes through untouched."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._digests = [_digest(key) for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one connection on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = accepted_request_id(headers.get("x-request-id"))
        scope["gnomon.request_id"] = request_id
        scope["gnomon.send"] = send  # for bodies of streams: nobody in between looks at them
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._state.metrics.count_answer(message["status"])
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode("ascii")),
                ]
            await send(message)

        problem = self._refusal(scope["path"], headers.get("authorization"))
        if problem is not None:
            await problem.response()(scope, receive, send_on)
            return
        try:
            await self._app(scope, receive, send_on)
        except ClientDisconnect:
            self._state.metrics.count_answer(CLIENT_LEFT)
        except Exception as error:
            logger.exception("%s %s failed (%s)", scope["method"], scope["path"], request_id)
            if not has_begun:
                await problem_of(error).response()(scope, receive, send_on)

    def _refusal(self, path: str, authorization: str | None) -> Problem | None:
        """Why a request goes no further, if so."""
        if path in OPEN_PATHS:
            return None
        if self._digests and not self._is_known(authorization):
            return problem_of(
                RequestError(
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    status=401,
                )
            )
        return draining_problem() if self._state.is_draining else None

    def _is_known(self, authorization: str | None) -> bool:
        scheme, _, key = (authorization or "").partition(" ")
        sent = _digest(key.strip())
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()
