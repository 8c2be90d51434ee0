"""Server-sent events by themselves: comments in silence, errors after the first byte, leaving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from gnomon.errors import EngineDeadError
from gnomon.server.app import create_app
from gnomon.server.settings import ServerSettings
from gnomon.server.stream import EventStream, unless_client_leaves
from tests.server.fake_engine import SENTENCE, FakeEngine

pytestmark = pytest.mark.anyio


class Wire:
    """ASGI's receive and send, kept in memory; `leave` is the client closing its connection."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def send(wire: Wire, events: AsyncGenerator[bytes], keep_alive_s: float = 60.0) -> list[str]:
    """Run a stream to its end; what was closed."""
    closed: list[str] = []

    async def close() -> None:
        closed.append("closed")

    stream = EventStream(events, close, keep_alive_s)
    await stream({"type": "http"}, wire.receive, wire.send)
    return closed


async def words(*items: bytes) -> AsyncGenerator[bytes]:
    for item in items:
        yield item


async def test_events_then_done_then_closed() -> None:
    wire = Wire()
    assert await send(wire, words(b"1", b"2")) == ["closed"]
    assert wire.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert wire.sent[-1]["more_body"] is False
    headers = dict(wire.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers


async def test_silence_is_filled_with_comments() -> None:
    async def slow() -> AsyncGenerator[bytes]:
        yield b"1"
        while wire.body.count(b": keep-alive\n\n") < 3:
            await asyncio.sleep(0.001)
        yield b"2"

    wire = Wire()
    await send(wire, slow(), keep_alive_s=0.01)
    events = [part for part in wire.body.split(b"\n\n") if part and not part.startswith(b":")]
    assert events == [b"data: 1", b"data: 2", b"data: [DONE]"]
    assert wire.body.index(b"data: 1") < wire.body.index(b": keep-alive") < wire.body.index(b"2")


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineDeadError("it died"), "engine_dead"), (ValueError("inner"), "internal_error")],
)
async def test_an_error_after_the_first_byte_is_an_event(error: Exception, code: str) -> None:
    async def breaking() -> AsyncGenerator[bytes]:
        yield b"1"
        raise error

    wire = Wire()
    assert await send(wire, breaking()) == ["closed"]
    _, second, last, _ = wire.body.split(b"\n\n")
    assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == code
    assert last == b"data: [DONE]"
    assert b"inner" not in wire.body


async def test_a_client_that_leaves_cancels_the_source() -> None:
    ended: list[str] = []

    async def endless() -> AsyncGenerator[bytes]:
        try:
            yield b"1"
            wire.left.set()
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    wire = Wire()
    assert await send(wire, endless()) == ["closed"]
    assert ended == ["ended"]
    assert b"DONE" not in wire.body


async def test_work_is_cancelled_when_nobody_waits_for_it() -> None:
    wire = Wire()
    started = asyncio.Event()

    async def work() -> str:
        started.set()
        await asyncio.Event().wait()
        return "done"

    async def leave() -> None:
        await started.wait()
        wire.left.set()

    leaving = asyncio.create_task(leave())
    assert await unless_client_leaves(wire.receive, work()) is None
    await leaving

    async def quick() -> str:
        return "done"

    assert await unless_client_leaves(Wire().receive, quick()) == "done"


async def test_a_long_prefill_keeps_the_line_alive() -> None:
    """Through the app: the engine is silent before the first token."""
    engine = FakeEngine()
    engine.gate.clear()
    app = create_app(engine, ServerSettings(sse_keep_alive_s=0.01))
    body = {"prompt": "a", "max_tokens": 3, "stream": True}

    async def open_gate() -> None:
        await asyncio.sleep(0.05)
        engine.gate.set()

    opening = asyncio.create_task(open_gate())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://house") as client:
        answer = await client.post("/v1/completions", json=body)
    await opening
    assert answer.text.startswith(": keep-alive\n\n")
    texts = [
        json.loads(line[6:])["choices"][0]["text"]
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    assert SENTENCE.startswith("".join(texts))


async def test_a_failure_in_the_middle_of_a_chat_stream() -> None:
    engine = FakeEngine()
    engine.fails_at = 2
    app = create_app(engine)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "stream": True}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://house") as client:
        answer = await client.post("/v1/chat/completions", json=body)
    lines = [line for line in answer.text.splitlines() if line]
    assert len(lines) == 4  # two tokens, the error, [DONE]
    assert json.loads(lines[2][6:])["error"]["message"] == "layer 3 made NaN"
    assert engine.open == set()
