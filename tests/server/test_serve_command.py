"""`gnomon serve` as a process: start, answer, refuse, drain on SIGTERM; and the chat command.

The one test file that starts the whole command; the rest of the server is tested in process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

FLAGS = (
    "random:deepseek_v32,layers=2",
    *("--port", "0", "--max-model-len", "512", "--num-kv-pages", "64"),
    *("--drain-timeout-s", "20", "--api-key", "noon", "--served-model-name", "pin"),
)


class Command:
    """A running `gnomon serve`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gnomon.cli.main", "serve", *FLAGS],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"serving pin at (http://127\.0\.0\.1:\d+)/v1", line)
        assert found, (line, log.read_text())
        self.url = found[1]

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path / "log")
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()
    assert made.process.stdout is not None
    made.process.stdout.close()


def test_a_signal_drains_the_house(command: Command) -> None:
    assert command.status("/ready") == 200
    assert command.status("/v1/models") == 401
    one_chat(command)
    client = openai.OpenAI(base_url=f"{command.url}/v1", api_key="noon", max_retries=0)
    with client:
        stream = client.completions.create(
            model="pin",
            prompt="Go on",
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [next(stream)]
        command.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while command.status("/ready") != 503:
            assert time.monotonic() < deadline
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="pin", prompt="Me too", max_tokens=1)
        assert refused.value.code == "draining"
        chunks.extend(stream)
    assert chunks[-1].choices[0].finish_reason == "length"  # it ran to its end
    assert command.process.wait(30) == 0
    log = command.log.read_text()
    assert "loaded random:deepseek_v32,layers=2" in log
    assert "Traceback" not in log
    assert log.count(" finish=length ") == 2


def one_chat(command: Command) -> None:
    """`gnomon chat --url`, a line at a time."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gnomon.cli.main", "chat", "--url", command.url),
            *("--api-key", "noon", "--max-tokens", "5", "--temperature", "0"),
        ],
        input="Which way is north?\n/exit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip()


def test_a_dead_engine_turns_health_red(command: Command) -> None:
    """The engine process is killed while it works: its request fails, the probes say 503."""
    [engine] = psutil.Process(command.process.pid).children()
    failures: list[str] = []

    def run() -> None:
        body = json.dumps({"prompt": "Go on", "max_tokens": 400, "ignore_eos": True}).encode()
        headers = {"Authorization": "Bearer noon"}
        request = urllib.request.Request(f"{command.url}/v1/completions", body, headers)
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            with error:
                failures.append(json.load(error)["error"]["code"])

    running = threading.Thread(target=run)
    running.start()
    while not metric_is_one(command):
        assert running.is_alive()
    engine.kill()
    running.join(30)
    assert failures == ["engine_dead"]
    assert command.status("/health") == 503
    assert command.status("/ready") == 503
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(30) == 0


def metric_is_one(command: Command) -> bool:
    with urllib.request.urlopen(f"{command.url}/metrics", timeout=20) as page:
        return "gnomon_num_requests_running 1.0" in page.read().decode()
