"""What the shadow finds on its way out: heartbeats of an idle engine, and the metrics page."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gnomon.engine.client import ProcessClient
from gnomon.engine.config import EngineConfig
from gnomon.engine.launch import EngineProcess
from gnomon.engine.messages import EngineRequest, EngineStats, ShadowOperator, ShadowStats
from gnomon.engine.wire import Heartbeat, decode_event, encode
from gnomon.errors import EngineDeadError
from gnomon.server.metrics import ServerMetrics
from tests.engine import stand_in_core

FOUND = ShadowStats(
    steps=12,
    dropped=3,
    errors=1,
    late_calls=5,
    operators={
        "topk": ShadowOperator(cases=40),
        "moe": ShadowOperator(cases=9, differing=2, worst_difference=0.25, worst_share=math.inf),
    },
)


class Idle:
    """An engine of which only the counters are asked for."""

    is_healthy = True

    def __init__(self, shadow: ShadowStats | None) -> None:
        self.shadow = shadow

    def stats(self) -> EngineStats:
        return EngineStats(num_steps=7, shadow=self.shadow)


def samples(shadow):
    page = ServerMetrics(Idle(shadow)).page().decode()
    return {
        (sample.name, sample.labels.get("operator")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "shadow" in sample.name
    }


def test_the_page_shows_every_operator_by_label():
    found = samples(FOUND)
    assert found[("gnomon_shadow_steps_total", None)] == 12
    assert found[("gnomon_shadow_dropped_total", None)] == 3
    assert found[("gnomon_shadow_errors_total", None)] == 1
    assert found[("gnomon_shadow_late_calls_total", None)] == 5
    assert found[("gnomon_shadow_cases_total", "topk")] == 40
    assert found[("gnomon_shadow_differing_total", "topk")] == 0
    assert found[("gnomon_shadow_differing_total", "moe")] == 2
    assert found[("gnomon_shadow_worst_difference", "moe")] == 0.25
    assert found[("gnomon_shadow_worst_share", "moe")] == math.inf


def test_the_page_says_nothing_of_a_shadow_that_is_off():
    assert samples(None) == {}


def test_heartbeats_carry_it_to_the_bit():
    assert decode_event(encode(Heartbeat(0.5, FOUND))) == Heartbeat(0.5, FOUND)


@pytest.fixture
def process(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    started = EngineProcess(EngineConfig(shadow=0.5), build="stand_in_core:build")
    yield started
    started.close()


def test_an_idle_engine_tells_what_its_shadow_found_meanwhile(process):
    async def main():
        client = ProcessClient(process)
        client.attach()
        try:
            assert client.stats().shadow is None
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if client.stats().shadow is not None:
                    break
            return client.stats()
        finally:
            client.close()

    stats = asyncio.run(main())
    assert stats.shadow == ShadowStats(steps=3, dropped=7)
    assert stats.num_steps == 0


def test_the_error_of_a_dead_engine_names_the_step(process):
    request = EngineRequest(request_id="x", prompt_token_ids=[stand_in_core.RAISE])

    async def main():
        client = ProcessClient(process)
        client.attach()
        try:
            async for _ in client.submit([request]):
                pass
        finally:
            client.close()

    with pytest.raises(EngineDeadError, match="a step raised on purpose; in step 41"):
        asyncio.run(main())
