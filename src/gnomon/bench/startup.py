"""`gnomon bench startup`: how long `gnomon serve` takes until it answers, cold and warm.

In:  the arguments of `gnomon serve`. Out: seconds from the launch of the process to a healthy
     server, and to the first answer after it; when each stage of the start was done, by the
     server's own log, counted from the beginning of its loading, "loaded" being the last.
     ConfigError for an argument that is set here: the address, and a key to ask with.
Cold: Triton's and torch's kernel caches are an empty folder of this run; warm: the same folder.
Not here: what the server does meanwhile (its own log says it).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from gnomon.bench.serve import ServeSettings, bench_serve
from gnomon.errors import ConfigError, GnomonError

PATIENCE_S = 900.0
POLL_S = 0.1
STOP_S = 30.0
HOST = "127.0.0.1"
STAGE = re.compile(r"^  (\S.*?) 100%(?: .*)? at ([0-9.]+) s$", re.MULTILINE)
LOADED = re.compile(r"^(loaded) .* in ([0-9.]+) s$", re.MULTILINE)
API_KEY_VARIABLE = "GNOMON_API_KEY"
TAKEN = ("--host", "--port", "--api-key")
LAUNCH = "from gnomon.cli.main import main; main()"


@dataclass(frozen=True, slots=True)
class StartupTime:
    """Seconds since the process was launched. ``first_answer_s``: one short completion later."""

    kind: str  # "cold" or "warm"
    healthy_s: float
    first_answer_s: float
    stages: tuple[tuple[str, float], ...] = ()


def bench_startup(arguments: Sequence[str]) -> Iterator[StartupTime]:
    """Start, ask once and stop a server, cold and then warm. GnomonError if it does not start."""
    for argument in arguments:
        if argument.partition("=")[0] in TAKEN:
            raise ConfigError(
                f"{argument} is among the arguments of gnomon serve: the bench chooses an address "
                f"of its own and asks without a key. Leave {', '.join(TAKEN)} out."
            )
    with TemporaryDirectory(prefix="gnomon-startup-") as folder:
        for kind in ("cold", "warm"):
            yield _start(kind, arguments, Path(folder))


def _start(kind: str, arguments: Sequence[str], folder: Path) -> StartupTime:
    port = _free_port()
    caches = {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
        "DG_JIT_CACHE_DIR": str(folder / "deepgemm"),
    }
    command = [sys.executable, "-c", LAUNCH, "serve", *arguments]
    command += ["--host", HOST, "--port", str(port)]
    log = folder / f"{kind}.log"
    environment = os.environ | caches
    environment.pop(API_KEY_VARIABLE, None)
    with log.open("wb") as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _await_health(process, port, begin, log)
            healthy = time.perf_counter() - begin
            one = ServeSettings(num_requests=1, concurrency=1, input_len=8, output_len=2)
            (answer,) = bench_serve(f"http://{HOST}:{port}", "", one).answers
            if answer.error:
                raise GnomonError(f"the server started but did not answer: {answer.error}")
            taken = time.perf_counter() - begin
            return StartupTime(kind, healthy, taken, stages_of(log.read_text(errors="replace")))
        finally:
            _stop(process)


def stages_of(log: str) -> tuple[tuple[str, float], ...]:
    """(stage, seconds) of the stages that a start's log says were done."""
    found = [*STAGE.findall(log), *LOADED.findall(log)]
    return tuple((name, float(seconds)) for name, seconds in found)


def _await_health(process: subprocess.Popen[bytes], port: int, begin: float, log: Path) -> None:
    while True:
        if process.poll() is not None:
            tail = log.read_text(errors="replace")[-2000:]
            raise GnomonError(
                f"the server ended with {process.returncode} before it was up: {tail}"
            )
        if time.perf_counter() - begin > PATIENCE_S:
            raise GnomonError(f"the server was not healthy within {PATIENCE_S:.0f} s")
        if _is_healthy(port):
            return
        time.sleep(POLL_S)


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
