"""The engine process: handshake, streams, aborts, drains, and every way to die."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from gnomon.engine.client import ProcessClient
from gnomon.engine.config import EngineConfig
from gnomon.engine.launch import EngineProcess
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import ConfigError, EngineDeadError, OverloadError
from tests.engine import stand_in_core as core

HERE = Path(__file__).parent


@pytest.fixture
def start(monkeypatch):
    """A function that starts an engine process; all are ended with the test."""
    monkeypatch.syspath_prepend(str(HERE))
    started: list[EngineProcess] = []

    def begin(progress=None, **flags) -> EngineProcess:
        process = EngineProcess(EngineConfig(**flags), progress, build="stand_in_core:build")
        started.append(process)
        return process

    yield begin
    for process in started:
        process.close()


def ask(name: str, wish: int = core.PLAIN, num_tokens: int = 3) -> EngineRequest:
    params = SamplingParams(max_tokens=num_tokens)
    return EngineRequest(request_id=name, prompt_token_ids=[wish], params=params)


async def collect(stream) -> dict[str, list]:
    found: dict[str, list] = {}
    async for deltas in stream:
        for delta in deltas:
            found.setdefault(delta.request_id, []).append(delta)
    return found


def serve(process: EngineProcess, scenario, hang_timeout_s: float = 30.0):
    """Run scenario(client) in an event loop, then close the client."""

    async def main():
        client = ProcessClient(process, hang_timeout_s)
        client.attach()
        try:
            return await scenario(client)
        finally:
            client.close()

    return asyncio.run(main())


async def has_ended(process: EngineProcess) -> bool:
    """Whether the process is gone within five seconds."""
    for _ in range(500):
        if not process.is_alive:
            return True
        await asyncio.sleep(0.01)
    return False


def test_start_reports_progress_and_its_folder_is_private(start):
    seen = []
    process = start(lambda *report: seen.append(report))
    assert seen[0] == ("engine process", 1, 1)
    assert seen[-1] == ("weights", 2, 2)
    assert process.info.model_label == "stand-in"
    folder = process._folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(str(folder / "c")) < 100
    process.close()
    process.close()
    assert not folder.exists()
    assert not process.is_alive


@pytest.mark.parametrize(("level", "said"), [("INFO", True), ("WARNING", False)])
def test_the_engine_logs_at_the_level_of_its_parent(start, capfd, monkeypatch, level, said):
    monkeypatch.setattr(logging.getLogger("gnomon"), "level", getattr(logging, level))
    start().close()
    assert ("INFO gnomon.stand_in counts tokens" in capfd.readouterr().err) is said


def test_a_ready_engine_takes_commands_at_once(start):
    """The sockets connect in either order; ready means that both have (no EAGAIN on submit)."""
    for _ in range(3):
        process = start()
        assert process.commands.poll(0, zmq.POLLOUT)
        process.close()


def test_a_failed_start_raises_what_the_engine_raised(start):
    with pytest.raises(ConfigError, match="a flag is wrong"):
        start(seed=core.BAD_CONFIG_SEED)
    with pytest.raises(EngineDeadError, match="exited with code 3 while it was starting"):
        start(seed=core.SILENT_EXIT_SEED)


def test_streams_bring_every_token_in_order_and_end(start):
    async def scenario(client):
        streams = [client.submit([ask(f"{i}a", num_tokens=50), ask(f"{i}b")]) for i in range(4)]
        for i, stream in enumerate(streams):
            found = await collect(stream)
            tokens = {name: [d.token_ids[0] for d in deltas] for name, deltas in found.items()}
            assert tokens == {f"{i}a": list(range(50)), f"{i}b": [0, 1, 2]}
            assert [found[name][-1].finish_reason for name in found] == ["length"] * 2
        assert client.num_in_flight == 0
        assert client.stats().running == 0
        assert client.is_healthy

    serve(start(), scenario)


def test_one_request_is_refused_and_its_mates_go_on(start):
    async def scenario(client):
        mate = client.submit([ask("mate", core.SLOW, 20)])
        with pytest.raises(OverloadError) as caught:
            await collect(client.submit([ask("full", core.FULL), ask("too")]))
        assert caught.value.retry_after_s == 7.5
        assert len((await collect(mate))["mate"]) == 20
        assert client.num_in_flight == 0

    serve(start(), scenario)


def test_more_than_the_engine_holds_is_refused_at_once(start):
    async def scenario(client):
        streams = [client.submit([ask(str(i), core.SLOW, 5)]) for i in range(8)]
        with pytest.raises(OverloadError, match="8 requests are in flight"):
            client.submit([ask("ninth")])
        for stream in streams:
            await collect(stream)
        assert len((await collect(client.submit([ask("tenth")])))["tenth"]) == 3

    serve(start(), scenario)


def test_aborted_requests_end_there_and_here(start):
    async def scenario(client):
        stream = client.submit([ask("gone", core.SLOW, 10_000), ask("kept", core.SLOW, 30)])
        await anext(stream)
        client.abort(["gone", "nobody"])
        found = await collect(stream)
        assert found["kept"][-1].finish_reason == "length"
        assert client.num_in_flight == 0
        after = client.submit([ask("after")])
        await collect(after)
        assert client.stats().running == 0

    serve(start(), scenario)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (core.KILL, r"killed by signal 9 .*step \d+ was the last"),
        (core.RAISE, "ValueError: a step raised on purpose; in step 41"),
        (core.FREEZE, r"no sign of life .*step \d+ was the last"),
    ],
)
def test_death_is_seen_and_fails_what_runs(start, wish, reason):
    process = start()

    async def scenario(client):
        streams = [client.submit([ask("mate", core.SLOW, 10_000)])]
        await anext(streams[0])
        assert client.death is None
        streams.append(client.submit([ask("x", wish)]))
        for stream in streams:
            with pytest.raises(EngineDeadError, match=reason):
                await collect(stream)
        assert not client.is_healthy
        assert re.search(reason, client.death)
        assert client.num_in_flight == 0
        with pytest.raises(EngineDeadError, match=reason):
            client.submit([ask("late")])
        client.abort(["mate"])
        await client.drain(1.0)

    serve(process, scenario, hang_timeout_s=3.0)
    assert not process.is_alive


def test_death_of_an_idle_engine_is_seen_at_once(start):
    process = start()

    async def scenario(client):
        began = time.monotonic()
        process.process.kill()
        while client.is_healthy:
            await asyncio.sleep(0.001)
        assert time.monotonic() - began < 5.0

    serve(process, scenario)


def test_a_drain_lets_the_short_finish_and_aborts_the_long(start):
    process = start()

    async def scenario(client):
        short = client.submit([ask("short", core.SLOW, 5)])
        long = client.submit([ask("long", core.SLOW, 10_000)])
        await anext(long)
        await client.drain(0.3)
        with pytest.raises(EngineDeadError, match="going down"):
            client.submit([ask("late")])
        assert (await collect(short))["short"][-1].finish_reason == "length"
        assert (await collect(long))["long"][-1].finish_reason == "abort"
        assert await has_ended(process)

    serve(process, scenario)
    assert process.process.returncode == 0


def test_sigterm_to_the_engine_is_a_drain(start):
    process = start(drain_timeout_s=0.2)

    async def scenario(client):
        long = client.submit([ask("long", core.SLOW, 10_000)])
        await anext(long)
        process.process.send_signal(signal.SIGTERM)
        assert (await collect(long))["long"][-1].finish_reason == "abort"
        assert await has_ended(process)
        assert not client.is_healthy

    serve(process, scenario)
    assert process.process.returncode == 0


def test_sigint_to_the_group_leaves_the_engine_to_its_parent(start):
    process = start()

    async def scenario(client):
        process.process.send_signal(signal.SIGINT)
        assert len((await collect(client.submit([ask("after")])))["after"]) == 3

    serve(process, scenario)


def test_an_orphaned_engine_ends(tmp_path):
    """A parent that is killed, without a chance to say so, takes its engine with it."""
    script = tmp_path / "parent.py"
    script.write_text(
        "from __future__ import annotations\n"
        "import sys, time\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from gnomon.engine.config import EngineConfig\n"
        "from gnomon.engine.launch import EngineProcess\n"
        "process = EngineProcess(EngineConfig(), build='stand_in_core:build')\n"
        "print(process.process.pid, process._folder, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        parent.kill()
    for _ in range(500):
        if not Path(f"/proc/{int(pid)}").exists():
            break
        time.sleep(0.01)
    else:
        os.kill(int(pid), signal.SIGKILL)
        pytest.fail("the engine outlived its parent by five seconds")
    assert not Path(folder.decode()).exists()
