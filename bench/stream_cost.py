"""CPU that one streamed token costs in each process: engine, API server, client of `bench serve`.

In:  numbers of streams, tokens a second in all, seconds; `--profile FILE` keeps the API's cProfile.
Out: per number of streams and process, CPU microseconds per token by the kernel's process clocks,
     and events per token (below one where several tokens of a stream came together).
The engine process runs a core without a model that gives every request a token per step, at steady
times: what is left is the loop, the message and its sending. All else is as in service.
Not here: latency (server_overhead.py); steps (`gnomon bench step`).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from gnomon.engine.config import EngineConfig
from gnomon.engine.launch import EngineProcess
from gnomon.engine.messages import EngineRequest, EngineStats, OutputDelta
from gnomon.engine.wire import EngineInfo

VOCAB = 128_000


class SteadyCore:
    """A token for every request per step; steps begin at steady times."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._alive: dict[str, list[Any]] = {}
        self._next = 0.0
        self._num_steps = 0
        self.info = EngineInfo(
            model_label="steady",
            model_type="deepseek_v32",
            revision="",
            folder=None,
            tokenizer=None,
            vocab_size=VOCAB,
            max_model_len=100_000,
            max_in_flight=4096,
            drain_timeout_s=1.0,
            eos_token_ids=(),
            generation_defaults={},
            resolved={},
            operators=[],
            cache={},
        )

    @property
    def has_work(self) -> bool:
        return bool(self._alive)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for one in requests:
            self._alive[one.request_id] = [one, 0]

    def abort(self, request_ids: Sequence[str]) -> list[OutputDelta]:
        known = [name for name in request_ids if self._alive.pop(name, None)]
        return [OutputDelta(request_id=name, finish_reason="abort") for name in known]

    def abort_all(self) -> list[OutputDelta]:
        return self.abort(list(self._alive))

    def stats(self) -> EngineStats:
        running = len(self._alive)
        return EngineStats(running=running, num_steps=self._num_steps, step_tokens=running)

    def shadow_stats(self) -> None:
        return None

    def reset_prefix_cache(self) -> None:
        self._num_steps = 0

    def step(self) -> list[OutputDelta]:
        wait = self._next - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        self._next = max(time.monotonic() - 0.1, self._next) + len(self._alive) / self._tokens_per_s
        self._num_steps += 1
        return [self._advance(name) for name in list(self._alive)]

    def _advance(self, name: str) -> OutputDelta:
        entry = self._alive[name]
        request, count = entry
        entry[1] = count + 1
        is_last = count + 1 == request.params.max_tokens
        if is_last:
            del self._alive[name]
        return OutputDelta(
            request_id=name,
            token_ids=[1000 + (count * 7919) % 2000],
            finish_reason="length" if is_last else None,
            num_prompt_tokens=len(request.prompt_token_ids),
        )


def build_core(config: EngineConfig, progress: Any, default_vocab_size: int | None) -> SteadyCore:
    """The core of the engine process; its rate travels in `seed`."""
    return SteadyCore(float(config.seed))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--tokens-per-s", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--profile", help="file for the API process's cProfile")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_steadily(options)
        return
    for number in map(int, options.streams.split(",")):
        found = measure(number, options)
        if options.json:
            print(json.dumps(found))
            continue
        print(
            f"{number:4} streams: CPU us/token  engine {found['engine']:6.1f}  api "
            f"{found['api']:6.1f}  client {found['client']:6.1f}   events/token "
            f"{found['events_per_token']:.3f}  {found['tokens_per_s']:.0f} tokens/s"
        )


def measure(streams: int, options: argparse.Namespace) -> dict[str, float]:
    """Start server and engine, run `streams` requests at once, read the clocks."""
    from gnomon.bench.serve import ServeSettings, bench_serve

    command = [sys.executable, __file__, "--serve", "--tokens-per-s", str(options.tokens_per_s)]
    command += ["--stream-interval", str(options.stream_interval)]
    command += ["--profile", options.profile] if options.profile else []
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port, engine = map(int, server.stdout.readline().split())
    length = max(2, int(options.seconds * options.tokens_per_s / streams))
    url = f"http://127.0.0.1:{port}"
    warm = ServeSettings(num_requests=4, concurrency=4, input_len=16, output_len=20)
    bench_serve(url, "", warm)
    settings = ServeSettings(
        num_requests=streams, concurrency=streams, input_len=16, output_len=length
    )
    clocks: list[tuple[float, ...]] = []

    def read_clocks() -> None:
        """In the middle of the run, so that neither beginnings nor ends of streams count."""
        for wait in (0.25, 0.5):
            time.sleep(wait * options.seconds)
            clocks.append((time.perf_counter(), *map(cpu_s, (engine, server.pid, os.getpid()))))

    reader = threading.Thread(target=read_clocks)
    reader.start()
    began = time.perf_counter()
    result = bench_serve(url, "", settings)
    reader.join()
    server.terminate()
    server.wait()
    errors = {answer.error for answer in result.answers if answer.error}
    assert not errors, errors
    window = (clocks[0][0] - began, clocks[1][0] - began)
    events = [
        (at, count)
        for answer in result.answers
        for at, count in zip(answer.arrivals, answer.event_tokens, strict=True)
        if window[0] <= at < window[1]
    ]
    tokens = sum(count for _, count in events)
    spent = [(b - a) / tokens * 1e6 for a, b in zip(*clocks, strict=True)][1:]
    return {
        "streams": streams,
        **dict(zip(("engine", "api", "client"), spent, strict=True)),
        "events_per_token": len(events) / tokens,
        "tokens_per_s": tokens / (window[1] - window[0]),
    }


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process (Linux's clock id of a process)."""
    return time.clock_gettime((~pid << 3) | 2)


def serve_steadily(options: argparse.Namespace) -> None:
    """The API process: print port and engine's pid, serve until told to end."""
    from gnomon.frontend import async_llm
    from gnomon.server import serving
    from gnomon.server.address import bind
    from gnomon.server.settings import ServerSettings

    async_llm.EngineProcess = functools.partial(EngineProcess, build="stream_cost:build_core")
    llm = async_llm.AsyncLLM(EngineConfig.of(seed=options.tokens_per_s))
    settings = ServerSettings(port=0, stream_interval=options.stream_interval)
    sock = bind(settings)
    ready = f"{sock.getsockname()[1]} {llm.client._process.process.pid}"
    profiler = cProfile.Profile() if options.profile else None

    async def run() -> None:
        llm.attach()
        if profiler is not None:
            profiler.enable()
        await serving.serve(llm, settings, sock, lambda: print(ready, flush=True))
        if profiler is not None:
            profiler.disable()

    try:
        asyncio.run(run())
    finally:
        llm.close()
        if profiler is not None:
            profiler.dump_stats(options.profile)


if __name__ == "__main__":
    main()
