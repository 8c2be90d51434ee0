"""One real server for the session: uvicorn on loopback in a thread, the engine in its process.

Out: `server` (addresses, the engine, a way to read the metrics), `client` (the official openai
     client). The model is a shallow random one with a small cache, few seats and a short queue,
     so that limits can be reached.
"""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from gnomon.engine.config import EngineConfig
from gnomon.frontend.async_llm import AsyncLLM
from gnomon.server.address import bind, url_of
from gnomon.server.app import create_app
from gnomon.server.serving import DrainingServer
from gnomon.server.settings import ServerSettings

MODEL = "random:deepseek_v32,layers=2"  # random weights: fast, and any text will do
LIMITS = {
    "max_num_seqs": 8,
    "max_queue_size": 16,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "block_size": 16,
    "num_kv_pages": 300,
    "served_model_name": "sundial",
}


class RunningServer:
    """A server in a thread of this process."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        settings = ServerSettings(port=0, sse_keep_alive_s=5.0)
        self._socket = bind(settings)
        self.url = url_of(self._socket)
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(settings)))
        self._thread.start()
        assert self._is_ready.wait(60)

    async def _run(self, settings: ServerSettings) -> None:
        app = create_app(self.llm, settings)
        self._server = DrainingServer(app, self.llm, self._is_ready.set)
        self._loop = asyncio.get_running_loop()
        self.llm.attach()
        await self._server.serve(sockets=[self._socket])
        self.llm.close()

    def stop(self) -> None:
        """Drain and end, as a signal would."""
        self._loop.call_soon_threadsafe(self._server.begin_drain)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, as a scrape shows it now."""
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            lines = page.read().decode().splitlines()
        values = [line.split()[-1] for line in lines if line.split("{")[0].split()[0] == name]
        assert values, f"/metrics has no {name}"
        return sum(float(value) for value in values)

    def wait_for(self, name: str, wanted: float) -> None:
        """Wait until a metric has a value; an assertion fails after half a minute."""
        deadline = time.monotonic() + 30
        while self.metric(name) != wanted:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {wanted}"
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits and no page is held."""
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            self.wait_for(f"gnomon_{name}", 0)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    running = RunningServer(AsyncLLM(EngineConfig.of(model=MODEL, **LIMITS)))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
