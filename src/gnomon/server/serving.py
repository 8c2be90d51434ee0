"""Listen, serve, and go down in good order.

In:  a running engine, settings, a bound socket.
Out: `serve` returns when the server has gone down; the engine has drained by then.
At the first SIGTERM or SIGINT /ready turns 503, new requests are refused, running ones finish
within the deadline (`drain_timeout_s`), then connections close. A second signal ends it at once.
Not here: the app (app.py), the address (address.py), the start of the engine (cli).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from gnomon.server.app import create_app
from gnomon.server.engine_port import EnginePort
from gnomon.server.settings import ServerSettings
from gnomon.server.state import ServerState

logger = logging.getLogger(__name__)

LAST_BYTES_S = 5  # connections get so long to take the end of their answers
BACKLOG = 2048


class DrainingServer(uvicorn.Server):
    """uvicorn, but a signal drains the engine first."""

    def __init__(self, app: FastAPI, engine: EnginePort, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        super().__init__(config)
        self._engine = engine
        self._state: ServerState = app.state.gnomon
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal, in between any two instructions of the main thread: leave it to the loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Go down in good order; when it is going down already, at once."""
        if self._state.is_draining:
            logger.warning("told again to stop: running requests are given up")
            self.should_exit = self.force_exit = True
            return
        self._state.is_draining = True
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        deadline_s = self._engine.config.drain_timeout_s
        running = self._engine.stats().running
        logger.info("draining: %d requests may finish within %g s", running, deadline_s)
        try:
            await self._engine.drain(deadline_s)
        finally:
            self.should_exit = True


async def serve(
    engine: EnginePort,
    settings: ServerSettings,
    sock: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve an engine on a bound socket until a signal ends it."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()  # what is here stays: looking through it again would stop all streams for 60 ms
    server = DrainingServer(create_app(engine, settings), engine, on_ready)
    await server.serve(sockets=[sock])
