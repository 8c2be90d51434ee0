"""Run a job and send its answer, as events or whole; the same for both kinds of completion.

In:  the request, a Generation, the writer that turns its deltas into an answer.
Out: a Response. Whatever happens, the generation is closed, so that nothing runs for nobody.
Not here: the shape of the answer (chat.py, completions.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec
from fastapi import Request, Response

from gnomon.server.generation import Generation, Job
from gnomon.server.state import ServerState
from gnomon.server.stream import CLIENT_LEFT, EventStream, unless_client_leaves


class Writer(Protocol):
    """Makes the answer of one request out of its deltas, by one of two ways."""

    def events(self) -> AsyncGenerator[bytes]:
        """The JSON bodies of the events of a stream."""
        ...

    async def answer(self) -> msgspec.Struct:
        """The whole answer, when it is complete."""
        ...


async def started(state: ServerState, job: Job) -> Generation:
    """A generation of this job that the engine has taken on."""
    generation = Generation(
        state.engine, state.metrics, job, logs_prompt=state.settings.log_requests
    )
    await generation.start()
    return generation


async def respond(
    request: Request, state: ServerState, generation: Generation, writer: Writer, *, streams: bool
) -> Response:
    """The answer of a started generation, or an empty one if the client has left."""
    if streams:
        return EventStream(writer.events(), generation.close, state.settings.sse_keep_alive_s)
    try:
        answer = await unless_client_leaves(request.receive, writer.answer())
    finally:
        await generation.close()
    if answer is None:
        return Response(status_code=CLIENT_LEFT)
    return Response(msgspec.json.encode(answer), media_type="application/json")
