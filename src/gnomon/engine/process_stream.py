"""The deltas of one submit, from the event loop's reader to who waits for them.

In:  OutputDeltas as they come off the wire (`put`), ends of another kind (`forget`, `fail`).
Out: lists of OutputDelta: all that arrived since the last look, by `async for`, or by `take` and
     `arrival`, which cost less.
All methods belong to the event loop's thread.
Not here: the wire (client.py), text (frontend).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from gnomon.engine.messages import OutputDelta
from gnomon.errors import GnomonError


class ProcessStream:
    """Deltas of the requests of one `submit`; ends when all of them have finished.

    Who waits for it is woken by the first delta of each request, by ends, and else by `interval`
    deltas per open request: waking costs more than a delta does.
    """

    def __init__(self, request_ids: Sequence[str], interval: int = 1) -> None:
        self._open = set(request_ids)
        self._interval = interval
        self._silent = set(request_ids)  # nothing has come of these
        self._arrived: list[OutputDelta] = []
        self._error: GnomonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, delta: OutputDelta) -> None:
        """Take one delta off the wire."""
        arrived = self._arrived
        arrived.append(delta)
        if delta.finish_reason is not None:
            self._open.discard(delta.request_id)
        elif delta.request_id in self._silent:
            self._silent.discard(delta.request_id)
        elif len(arrived) < self._interval * len(self._open):
            return
        if self._waiter is not None:
            self._wake()

    def forget(self, request_id: str) -> None:
        """Expect nothing more of a request that was aborted."""
        self._open.discard(request_id)
        self._wake()

    def fail(self, error: GnomonError) -> None:
        """Raise `error` once what has arrived is read."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[OutputDelta]:
        while not (arrived := self.take()):
            if not self._open:
                raise StopAsyncIteration
            await self.arrival()
        return arrived

    @property
    def has_more(self) -> bool:
        """Whether something can still come, or has come and was not taken."""
        return bool(self._open or self._arrived or self._error)

    def take(self) -> list[OutputDelta]:
        """What has arrived since the last look, perhaps nothing; the error of `fail` behind it."""
        if not self._arrived and self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return arrived

    def arrival(self) -> asyncio.Future[None]:
        """Done when something has happened since the last `take`. One waits at a time."""
        self._waiter = self._loop.create_future()
        return self._waiter
