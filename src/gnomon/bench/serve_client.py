"""The client of `gnomon bench serve`: cheap while it measures, careful afterwards.

In:  a server's address; prompts. Out: of each request the pieces of its answer with the time each
     arrived (`Received`), from which `read_events` tells, after the run, when which tokens came;
     `ClientLoad`, how busy the client was itself.
While a run goes on nothing is parsed: a piece costs a read, a look at the clock and an append, on
one asyncio loop. What was received is kept until the run has ended, about 250 bytes a token.
An event's time is that of the piece that completed its line.
Not here: what is asked, and the figures (serve.py).
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from gnomon.errors import ConfigError, GnomonError

TIMEOUT_S = 600.0  # without a byte
LAST_CHUNK = b"\r\n0\r\n\r\n"
TICK_S = 0.02
WINDOW_S = 0.25
BUSY_SHARE = 0.8
Pieces = list[tuple[float, bytes]]  # (time on the perf_counter's clock, bytes)


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """The client's own part: CPU time of its thread per second, over the run and in the busiest
    quarter of one; how late it noticed what happened, in ms (its timers' 99th percentile).
    """

    cpu_share: float
    busiest_share: float
    late_ms: float

    @property
    def is_bottleneck(self) -> bool:
        """Whether it had, at least for a while, no time to spare: times are then its own."""
        return self.busiest_share >= BUSY_SHARE


class LoadMeter:
    """Watches the thread of the running loop from `start` to `stop`."""

    def start(self) -> None:
        """Begin."""
        self._late: list[float] = [0.0]
        self._shares: list[float] = []
        self._began = self._window = (time.perf_counter(), time.thread_time())
        self._ticking = asyncio.create_task(self._tick())

    def stop(self) -> ClientLoad:
        """What was seen."""
        self._ticking.cancel()
        share = self._share_since(self._began)
        late = sorted(self._late)
        return ClientLoad(
            share, max([*self._shares, share]), late[round(0.99 * (len(late) - 1))] * 1e3
        )

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self._late.append(max(0.0, now - before - TICK_S))
            if now - self._window[0] >= WINDOW_S:
                self._shares.append(self._share_since(self._window))
                self._window = (time.perf_counter(), time.thread_time())

    @staticmethod
    def _share_since(began: tuple[float, float]) -> float:
        return (time.thread_time() - began[1]) / max(1e-9, time.perf_counter() - began[0])


class Receiver(asyncio.Protocol):
    """One request on its own connection; `ended` is done when its answer is complete or lost."""

    def __init__(self, request: bytes) -> None:
        self.pieces: Pieces = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask at once."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep it, with its time."""
        self.pieces.append((time.perf_counter(), data))
        if data.endswith(LAST_CHUNK) or data == LAST_CHUNK[2:]:
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closes when it has said everything, as it was asked to."""
        if not self.ended.done():
            if exc is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(exc)

    async def wait(self) -> None:
        """Until the answer has ended; TimeoutError if nothing comes for TIMEOUT_S."""
        began = time.perf_counter()
        while not self.ended.done():
            last = self.pieces[-1][0] if self.pieces else began
            left = last + TIMEOUT_S - time.perf_counter()
            if left <= 0:
                assert self._transport is not None
                self._transport.abort()
                raise TimeoutError(f"nothing came for {TIMEOUT_S:.0f} s")
            await asyncio.wait((self.ended,), timeout=left)
        self.ended.result()


class StreamClient:
    """Knows the server's address and the model's name."""

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"url is {url!r}: {error}; give it as http://host:port.") from None
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"url is {url!r}: give it as http://host:port.")
        try:
            parts.hostname.encode("idna")
        except UnicodeError as error:
            raise ConfigError(f"url is {url!r}: its host is no name ({error}).") from None
        self._is_secure = parts.scheme == "https"
        self._ssl = ssl.create_default_context() if self._is_secure else None
        self._host = parts.hostname
        self._port = port or (443 if self._is_secure else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "api_key holds characters that no header can carry (a line's end, or none of "
                "ASCII); give it as the server has it."
            )
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model or self._served_model()

    def _served_model(self) -> str:
        """The first model that the server names. GnomonError if it does not answer."""
        secure = http.client.HTTPSConnection
        kind = secure if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", f"{self._base}/v1/models", headers=self._headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise GnomonError(
                    f"{self._host}:{self._port} does not name its models (HTTP {response.status}: "
                    f"{_shown(body)}); give the server's key with --api-key if it wants one, or "
                    "--served-model."
                )
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise GnomonError(
                f"{self._host}:{self._port} does not name its models ({type(error).__name__}: "
                f"{error}); is a server running there? If so, give --served-model."
            ) from None
        finally:
            connection.close()

    def request(self, prompt: list[int], num_tokens: int) -> bytes:
        """The bytes that ask for a streamed completion of exactly ``num_tokens``."""
        fields = {
            "model": self._model, "prompt": prompt, "max_tokens": num_tokens, "stream": True,
            "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }  # fmt: skip
        body = json.dumps(fields).encode()
        host = f"[{self._host}]" if ":" in self._host else self._host
        lines = [
            f"POST {self._base}/v1/completions HTTP/1.1",
            f"Host: {host}:{self._port}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self._headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def send(self, request: bytes) -> Pieces:
        """Send a request and take its answer; OSError (TimeoutError) if it is lost."""
        loop = asyncio.get_running_loop()
        _, receiver = await loop.create_connection(
            lambda: Receiver(request), self._host, self._port, ssl=self._ssl
        )
        await receiver.wait()
        return receiver.pieces


class _Replay(io.RawIOBase):
    """Pieces as a file that gives one of them per read and knows when the last one arrived."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = iter(pieces)
        self._rest = b""
        self.arrived = 0.0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next piece, or as much of it as fits; 0 at the end."""
        if not self._rest:
            self.arrived, self._rest = next(self._pieces, (self.arrived, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


class _Socket:
    """As much of a socket as http.client needs to read an answer."""

    def __init__(self, replay: _Replay) -> None:
        self._file = io.BufferedReader(replay)

    def makefile(self, mode: str) -> io.BufferedIOBase:
        """The answer's bytes."""
        return self._file


def read_events(pieces: Pieces) -> Iterator[tuple[float, dict[str, Any]]]:
    """(arrival, JSON) of each event of an answer.

    ValueError if it is no answer, holds an error or breaks off before its [DONE].
    """
    replay = _Replay(pieces)
    response = http.client.HTTPResponse(cast(socket.socket, _Socket(replay)))
    try:
        response.begin()
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {_shown(response.read(500))}")
        num_events = 0
        for line in response:
            if line.strip() == b"data: [DONE]":
                return
            if not line.startswith(b"data: "):
                continue
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"])[:300])
            num_events += 1
            yield replay.arrived, event
        raise ValueError(f"the stream broke off after {num_events} events, before [DONE]")
    except http.client.HTTPException as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _shown(body: bytes) -> str:
    return body[:500].decode(errors="replace")
