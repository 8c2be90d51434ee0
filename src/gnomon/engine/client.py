"""The asyncio side of an engine process: requests in, streams of deltas out, death noticed.

In:  EngineRequests, one or more that share a stream (the choices of one client request).
Out: a ProcessStream of their OutputDeltas.
Death is seen at once (the pipe of launch.py), hanging within `hang_timeout_s` (no heartbeat for so
long; the process is then killed). Either way every stream raises EngineDeadError, and so does
every later `submit`.
Bounds: at most info.max_in_flight requests are in flight; `submit` raises OverloadError beyond it,
so neither sockets nor streams can pile up.
Not here: text (frontend), the process itself (launch.py). All methods belong to the event loop's
thread; `attach` is called once in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec
import zmq

from gnomon.engine import wire
from gnomon.engine.launch import EngineProcess
from gnomon.engine.messages import EngineRequest, EngineStats
from gnomon.engine.process_stream import ProcessStream
from gnomon.errors import EngineDeadError, OverloadError, RequestError

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 60.0
STOP_GRACE_S = 5.0
LAST_WORDS_MS = 200
RETRY_AFTER_S = 1.0


class ProcessClient:
    """Requests to an EngineProcess and what comes back (module docstring)."""

    def __init__(self, process: EngineProcess, hang_timeout_s: float = HANG_TIMEOUT_S) -> None:
        self._process = process
        self._hang_timeout_s = hang_timeout_s
        self._streams: dict[str, ProcessStream] = {}
        self._stats = EngineStats()
        self._death: EngineDeadError | None = None
        self._is_draining = False
        self._is_stopped = False  # in good order, after a drain
        self._last_event = time.monotonic()
        self._events_fd = int(process.events.getsockopt(zmq.FD))
        self._watch: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event = asyncio.Event()

    @property
    def info(self) -> wire.EngineInfo:
        """What the engine said of itself when it was ready."""
        return self._process.info

    @property
    def is_healthy(self) -> bool:
        """Whether the engine lives and takes requests."""
        return self._death is None and not self._is_draining

    @property
    def death(self) -> str | None:
        """Why the engine died, with the step that it was in; None while it lives."""
        return None if self._death is None else str(self._death)

    @property
    def num_in_flight(self) -> int:
        """Requests whose end has not been seen."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """The counters after the last step that was seen."""
        return self._stats

    def attach(self) -> None:
        """Listen to the engine in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            raise EngineDeadError("this engine serves another event loop; start one per loop")
        self._loop = loop
        self._last_event = time.monotonic()
        loop.add_reader(self._events_fd, self._read_events)
        loop.add_reader(self._process.death_fd, self._on_death)
        self._look_after()
        loop.call_soon(self._read_events)  # what came before the reader does not trigger it

    def submit(self, requests: Sequence[EngineRequest], interval: int = 1) -> ProcessStream:
        """Send requests; all their deltas come by the stream returned (`interval`: see there)."""
        self._require_alive()
        if len(self._streams) + len(requests) > self.info.max_in_flight:
            raise OverloadError(
                f"{len(self._streams)} requests are in flight and {len(requests)} more do not fit "
                f"under the limit of {self.info.max_in_flight} (max_num_seqs + max_queue_size); "
                "try again later",
                RETRY_AFTER_S,
            )
        names = [request.request_id for request in requests]
        twice = next((name for name in names if name in self._streams), None)
        if twice is not None:
            raise RequestError(
                f"request_id {twice!r} is in use by a request that has not ended; choose another",
                param="request_id",
            )
        stream = ProcessStream(names, interval)
        for request in requests:
            self._streams[request.request_id] = stream
        self._send(wire.AddRequests(list(requests)))
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; nothing more of them will arrive. Unknown ids are ignored."""
        known = []
        for name in request_ids:
            stream = self._streams.pop(name, None)
            if stream is not None:
                stream.forget(name)
                known.append(name)
        if known and self._death is None and not self._is_stopped:
            self._send(wire.AbortRequests(known))

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages that no request holds."""
        self._require_alive()
        self._send(wire.ResetPrefixCache())

    async def drain(self, deadline_s: float) -> None:
        """No new requests; wait until the running ones have ended, the late ones by abort."""
        if self._death is not None or self._is_stopped:
            return
        self._is_draining = True
        self._send(wire.Drain(deadline_s))
        try:
            await asyncio.wait_for(self._ended.wait(), deadline_s + STOP_GRACE_S)
        except TimeoutError:
            self._die(f"the engine did not stop {STOP_GRACE_S:g} s after its drain's deadline")

    def close(self) -> None:
        """Stop listening and end the process; open streams raise EngineDeadError. Idempotent."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._events_fd)
            self._loop.remove_reader(self._process.death_fd)
        if self._watch is not None:
            self._watch.cancel()
        self._die("the engine was closed")
        self._process.close()

    def _require_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if self._is_draining or self._is_stopped:
            raise EngineDeadError("the engine is going down and takes no new requests")

    def _send(self, command: wire.Command) -> None:
        try:
            self._process.commands.send(wire.encode(command), zmq.NOBLOCK)
        except zmq.Again:  # no peer: it has just died, and the pipe will say so
            self._die(self._obituary("while requests were running"))

    def _read_events(self) -> None:
        """Take every event that has arrived; the fd is edge-triggered, so read to the end."""
        while True:
            try:
                data = self._process.events.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_event = time.monotonic()
            self._on_event(wire.decode_event(data))

    def _on_event(self, event: wire.Event) -> None:
        if isinstance(event, wire.StepOutput):
            self._stats = event.stats
            for delta in event.deltas:
                stream = self._streams.get(delta.request_id)
                if stream is None:
                    continue  # aborted here while the step ran there
                if delta.finish_reason is not None:
                    del self._streams[delta.request_id]
                stream.put(delta)
        elif isinstance(event, wire.Heartbeat):
            if event.shadow is not None:
                self._stats = msgspec.structs.replace(self._stats, shadow=event.shadow)
        elif isinstance(event, wire.RequestRefused):
            stream = self._streams.pop(event.request_id, None)
            if stream is not None:
                stream.fail(wire.refused_error(event))
        elif isinstance(event, wire.Draining):
            self._is_draining = True
        elif isinstance(event, wire.EngineStopped):
            self._is_stopped = True
            self._ended.set()
        elif isinstance(event, wire.EngineFailed):
            logger.error("the engine failed: %s\n%s", event.message, event.trace)
            self._die(f"the engine failed: {event.message}")

    def _on_death(self) -> None:
        """The pipe is closed: read the last words, then settle what is still open."""
        if self._loop is not None:
            self._loop.remove_reader(self._process.death_fd)
        self._read_events()
        # The pipe can close before zmq's own thread has handed over what was said at the end.
        while not (self._is_stopped or self._death) and self._process.events.poll(LAST_WORDS_MS):
            self._read_events()
        if self._is_stopped:
            self._fail_streams(EngineDeadError("the engine has stopped"))
        else:
            self._die(self._obituary("while it was serving"))

    def _obituary(self, when: str) -> str:
        """How an engine ended that could not tell it itself."""
        return self._process.obituary(f"{when}, {self._last_step()}")

    def _last_step(self) -> str:
        step = self._stats.num_steps
        return f"step {step} was the last that it told of" if step else "before its first step"

    def _die(self, reason: str) -> None:
        """The engine is of no use any more; the first reason is kept."""
        if self._death is None:
            self._death = EngineDeadError(reason)
            if not self._is_stopped:
                self._process.kill()
        self._fail_streams(self._death)
        self._ended.set()

    def _fail_streams(self, error: EngineDeadError) -> None:
        streams, self._streams = self._streams, {}
        for stream in set(streams.values()):
            stream.fail(EngineDeadError(str(error)))

    def _look_after(self) -> None:
        """Once in a while: has the engine been silent for too long?"""
        assert self._loop is not None
        silence = time.monotonic() - self._last_event
        if silence > self._hang_timeout_s and self._death is None and not self._is_stopped:
            logger.error("no sign of the engine for %.0f s; it is killed", silence)
            self._die(
                f"the engine gave no sign of life for {silence:.0f} s and was killed, "
                f"{self._last_step()}"
            )
            return
        self._watch = self._loop.call_later(self._hang_timeout_s / 4, self._look_after)
