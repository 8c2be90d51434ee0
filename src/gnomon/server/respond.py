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

from gnomon.errors import GnomonError
from gnomon.frontend.outputs import Delta
from gnomon.server.generation import Generation, Job
from gnomon.server.state import ServerState
from gnomon.server.stream import CLIENT_LEFT, EventStream, joined_events, unless_client_leaves


class Writer(Protocol):
    """Makes the answer of one request out of its deltas, by one of two ways."""

    def event(self, place: int, delta: Delta) -> bytes:
        """Streamed: the JSON of the event that tells of this delta."""
        ...

    def closing_event(self) -> bytes | None:
        """Streamed: the event behind all others, if there is one."""
        ...

    def add(self, place: int, delta: Delta) -> None:
        """Whole: keep what a delta brings."""
        ...

    def answer(self) -> msgspec.Struct:
        """Whole: the answer, when it is complete."""
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
        events = _events(generation, writer)
        return EventStream(events, generation.close, state.settings.sse_keep_alive_s)
    try:
        answer = await unless_client_leaves(request.receive, _whole(generation, writer))
    finally:
        await generation.close()
    if answer is None:
        return Response(status_code=CLIENT_LEFT)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _events(generation: Generation, writer: Writer) -> AsyncGenerator[bytes]:
    """What has come for this request since the last look is sent at once, however much it is."""
    while (arrived := await generation.arrived())[1]:
        place, deltas = arrived
        ready: list[bytes] = []
        for delta in deltas:
            try:
                generation.note(place, delta)
            except GnomonError:
                if ready:
                    yield joined_events(ready)
                raise
            ready.append(writer.event(place, delta))
        yield joined_events(ready)
    closing = writer.closing_event()
    if closing is not None:
        yield closing


async def _whole(generation: Generation, writer: Writer) -> msgspec.Struct:
    while (arrived := await generation.arrived())[1]:
        place, deltas = arrived
        for delta in deltas:
            generation.note(place, delta)
            writer.add(place, delta)
    return writer.answer()
