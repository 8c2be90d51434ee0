"""Server-sent events, and the client that may leave at any moment.

In:  an iterator of event bodies (JSON bytes), what to close at the end, ASGI's receive and send.
Out: `EventStream`, a response: one `data:` line per event, `: keep-alive` comments whenever nothing
     was sent for a while (a long prefill outlasts the patience of proxies), `data: [DONE]`.
     `unless_client_leaves`: the same watch for answers that are sent whole.
A client that leaves is noticed by a task that waits for `http.disconnect`; the work is cancelled
and its generation closed, which frees its pages.
Errors after the first byte are events: {"error": ...}, then [DONE]; a 200 cannot be taken back.
Not here: what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gnomon.errors import GnomonError
from gnomon.server.errors import problem_of

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_BETWEEN = b"\n\ndata: "
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
CLIENT_LEFT = 499  # nginx's number; nobody is there to read it, but the metrics count it


class EventStream(Response):
    """A response that sends events as they come. `close` is awaited however it ends."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]],
        keep_alive_s: float,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._keep_alive_s = keep_alive_s
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or as much as the client stays for."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        self._last_sent = time.monotonic()
        try:
            await send(start)
            send = scope.get("gnomon.send", send)
            beats = asyncio.create_task(self._keep_alive(send))
            try:
                await unless_client_leaves(receive, self._send_all(send))
            finally:
                await _cancelled(beats)
        finally:
            await asyncio.shield(self._close())

    async def _send_all(self, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events):
                async for event in self._events:
                    body = b"data: " + event + b"\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    self._last_sent = time.monotonic()
        except Exception as error:
            if not isinstance(error, GnomonError):
                logger.exception("a stream failed after it had begun")
            await _send_bytes(send, b"data: " + problem_of(error).body() + b"\n\n")
        await _send_bytes(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever the stream has been silent; ends with the stream."""
        while True:
            silent_s = time.monotonic() - self._last_sent
            if silent_s >= self._keep_alive_s:
                await _send_bytes(send, KEEP_ALIVE)
                self._last_sent = time.monotonic()
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)


def joined_events(bodies: Sequence[bytes]) -> bytes:
    """Several events that are to be sent at once, as one item of an EventStream."""
    return bodies[0] if len(bodies) == 1 else _BETWEEN.join(bodies)


async def unless_client_leaves(
    receive: Receive, work: Coroutine[Any, Any, Result]
) -> Result | None:
    """The result of the work, or None if the client left first; the work is then cancelled."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _cancelled(leaving)
        await _cancelled(working)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has gone; its result and errors are of no interest."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _send_bytes(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
