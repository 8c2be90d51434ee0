"""What happens before and after an endpoint: keys, ids, sizes, draining, death, defects.

In process, with a fake engine: httpx's ASGI transport, no sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gnomon.engine.config import EngineConfig
from gnomon.engine.launch import EngineProcess
from gnomon.frontend import async_llm
from gnomon.server.app import create_app
from gnomon.server.engine_port import EnginePort
from gnomon.server.settings import ServerSettings
from tests.engine import stand_in_core
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@contextlib.asynccontextmanager
async def connected(engine: EnginePort, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerSettings(**settings))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://house") as client:
        client.app = app  # type: ignore[attr-defined]
        yield client


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/tokenize", "/server_info"]
)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Basic one", "one", "Bearer one2", "Bearer ünö"]
)
async def test_without_the_key_nothing_opens(path: str, header: str | None) -> None:
    async with connected(FakeEngine(), api_key="one,two") as client:
        headers = {} if header is None else {"Authorization": header.encode()}
        answer = await client.request("POST", path, json=CHAT, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_any_of_the_keys_opens_and_probes_need_none() -> None:
    async with connected(FakeEngine(), api_key="one,two") as client:
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 200
        for path in ("/health", "/ready", "/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        info = await client.get("/server_info", headers={"Authorization": "Bearer one"})
    assert "one" not in json.dumps(info.json()["server"])


async def test_ids_of_requests_come_back_or_are_made() -> None:
    async with connected(FakeEngine()) as client:
        sent = await client.get("/health", headers={"X-Request-Id": "abc-1"})
        strange = await client.get("/health", headers={"X-Request-Id": b"a b\x80"})
        none = await client.get("/nowhere")
    assert sent.headers["x-request-id"] == "abc-1"
    assert len(strange.headers["x-request-id"]) == 32
    assert none.headers["x-request-id"]


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_over_the_limit_is_413(is_declared: bool) -> None:
    body = json.dumps({**CHAT, "user": "x" * 2000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with connected(FakeEngine(), max_body_bytes=1024) as client:
        answer = await client.post(
            "/v1/chat/completions", content=body if is_declared else pieces()
        )
        assert answer.status_code == 413
        assert "--max-body-bytes" in answer.json()["error"]["message"]
        short = await client.post("/v1/chat/completions", json=CHAT)
        assert short.status_code == 200


async def test_a_draining_house_lets_nobody_in() -> None:
    engine = FakeEngine()
    async with connected(engine) as client:
        client.app.state.gnomon.is_draining = True  # type: ignore[attr-defined]
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
    assert engine.started == []


async def test_a_dead_engine_is_503_everywhere() -> None:
    engine = FakeEngine()
    engine.death = "killed by signal 9"
    async with connected(engine) as client:
        for path in ("/health", "/ready"):
            told = await client.get(path)
            assert told.status_code == 503
            assert "killed by signal 9" in told.json()["status"]
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"


async def test_an_engine_that_dies_ends_its_requests() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with connected(engine) as client:
        running = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        while not engine.open:
            await asyncio.sleep(0)
        engine.death = "killed"
        engine.gate.set()
        assert (await running).status_code == 503
    assert engine.open == set()


async def test_a_request_that_fails_inside_is_500_for_it_alone() -> None:
    engine = FakeEngine()
    engine.fails_at = 2
    async with connected(engine) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "layer 3 made NaN"
    assert engine.open == set()


async def test_a_defect_is_500_in_shape_and_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()

    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "start", broken)
    with caplog.at_level(logging.ERROR):
        async with connected(engine) as client:
            answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret detail" in caplog.text


async def test_one_line_per_request_and_prompts_only_on_demand(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3, "user": "me"}
    for logs_prompts in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="gnomon"):
            async with connected(FakeEngine(), log_requests=logs_prompts) as client:
                await client.post(
                    "/v1/chat/completions", json=body, headers={"X-Request-Id": "r-9"}
                )
        lines = [record.getMessage() for record in caplog.records]
        assert ("a secret" in caplog.text) is logs_prompts
        [line] = [line for line in lines if "finish=" in line]
        for part in ("r-9", "finish=length", "generated=3", "cached=1", "ttft=", "user='me'"):
            assert part in line


async def test_a_death_in_a_step_names_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real engine process whose step raises: the request's 503 and the probes say which."""
    monkeypatch.syspath_prepend(str(Path(stand_in_core.__file__).parent))
    process = partial(EngineProcess, build="stand_in_core:build")
    monkeypatch.setattr(async_llm, "EngineProcess", process)
    llm = async_llm.AsyncLLM(EngineConfig())
    try:
        async with connected(llm) as client:
            assert (await client.get("/health")).status_code == 200
            body = {"prompt": [stand_in_core.RAISE], "max_tokens": 5}
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert "in step 41" in refused.json()["error"]["message"]
            for path in ("/health", "/ready"):
                told = await client.get(path)
                assert told.status_code == 503
                assert "in step 41" in told.json()["status"]
    finally:
        llm.close()
