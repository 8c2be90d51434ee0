"""A death is seen by a pipe, its words come by a socket: in either order, the words are heard."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import zmq

from gnomon.engine import wire
from gnomon.engine.client import ProcessClient
from gnomon.engine.messages import EngineRequest, EngineStats, OutputDelta
from tests.engine import stand_in_core


class LateEvents:
    """A socket whose messages are handed over only when somebody waits for them."""

    def __init__(self, *events: wire.Event) -> None:
        self.waiting = [wire.encode(event) for event in events]
        self.ready: list[bytes] = []

    def getsockopt(self, option: int) -> int:
        return -1

    def poll(self, timeout_ms: int) -> bool:
        self.ready += self.waiting[:1]
        del self.waiting[:1]
        return bool(self.ready)

    def recv(self, flags: int) -> bytes:
        if not self.ready:
            raise zmq.Again
        return self.ready.pop(0)


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (wire.EngineStopped(), None),
        (wire.EngineFailed("out of luck; in step 7", ""), "out of luck; in step 7"),
        (wire.Heartbeat(0.0), "gone, step 3 was the last"),
    ],
)
def test_last_words_that_come_behind_the_death_are_heard(last, reason):
    end = OutputDelta(request_id="a", token_ids=[5], finish_reason="abort")
    report = wire.StepOutput([end], EngineStats(num_steps=3))
    process = SimpleNamespace(
        events=LateEvents(report, last),
        info=stand_in_core.INFO,
        commands=SimpleNamespace(send=lambda data, flags: None),
        kill=lambda: None,
        obituary=lambda when: f"gone{when.removeprefix('while it was serving')}",
    )

    async def scenario():
        client = ProcessClient(process)
        stream = client.submit([EngineRequest(request_id="a", prompt_token_ids=[1])])
        client._on_death()
        assert [delta async for deltas in stream for delta in deltas] == [end]
        assert client.death is None if reason is None else reason in client.death

    asyncio.run(scenario())
