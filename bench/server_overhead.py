"""What the HTTP server adds to the engine with one stream: to the first token, and per token.

In:  a model (default: one random layer, so that the engine's own time hides little), repetitions.
Out: medians in ms of the engine alone (AsyncLLM) and of the same through HTTP, one after the other
     in turn in the same process, and their differences. `--json` for machines.
The client reads raw server-sent events; its own parsing is not in the numbers, its socket is.
Not here: throughput under load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time

from gnomon.engine.config import EngineConfig
from gnomon.engine.sampling_params import SamplingParams
from gnomon.frontend.async_llm import AsyncLLM
from gnomon.server.address import bind
from gnomon.server.app import create_app
from gnomon.server.serving import DrainingServer
from gnomon.server.settings import ServerSettings

PROMPT = "the shadow of the pin " * 3
Sample = tuple[float, float]  # seconds to the first token, seconds per further token


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:deepseek_v32,layers=1")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    llm = AsyncLLM(EngineConfig.of(model=options.model, num_kv_pages=128))
    found = asyncio.run(measure(llm, options.repetitions, options.tokens))
    if options.json:
        json.dump(found, sys.stdout, indent=2)
        return
    for name, values in found.items():
        print(
            f"{name:<16} engine {values['engine']:8.3f} ms   http {values['http']:8.3f} ms   "
            f"server adds {values['http'] - values['engine']:+.3f} ms"
        )


async def measure(llm: AsyncLLM, repetitions: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Medians in ms by quantity and route."""
    settings = ServerSettings(port=0)
    sock = bind(settings)
    port = sock.getsockname()[1]
    is_ready = asyncio.Event()
    server = DrainingServer(create_app(llm, settings), llm, is_ready.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await is_ready.wait()
    ids = llm.tokenizer.encode_plain(PROMPT)
    samples: dict[str, list[Sample]] = {"engine": [], "http": []}
    for turn in range(repetitions):
        samples["engine"].append(await through_engine(llm, ids, num_tokens, f"e{turn}"))
        samples["http"].append(await through_http(port, ids, num_tokens, f"h{turn}"))
    server.begin_drain()
    await serving
    llm.close()
    return {
        name: {
            route: statistics.median(sample[place] for sample in taken) * 1e3
            for route, taken in samples.items()
        }
        for place, name in enumerate(("first token", "further token"))
    }


async def through_engine(llm: AsyncLLM, ids: list[int], num_tokens: int, name: str) -> Sample:
    """One request by AsyncLLM."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    deltas = await llm.start(ids, params, request_id=name, cache_salt=name)
    times = [(time.perf_counter(), len(delta.token_ids)) async for delta in deltas]
    return sample(began, times, num_tokens)


async def through_http(port: int, ids: list[int], num_tokens: int, name: str) -> Sample:
    """The same request by HTTP."""
    fields = {"prompt": ids, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    fields |= {"stream": True, "cache_salt": name, "return_token_ids": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    lines = [(time.perf_counter(), line) async for line in reader if line.startswith(b"data: {")]
    writer.close()
    times = [(at, len(json.loads(line[6:])["choices"][0]["token_ids"])) for at, line in lines]
    return sample(began, times, num_tokens)


def sample(began: float, times: list[tuple[float, int]], num_tokens: int) -> Sample:
    """Seconds to the first token and per further one, of (time, tokens that came)."""
    assert sum(count for _, count in times) == num_tokens, (times, num_tokens)
    first, last = times[0][0], times[-1][0]
    return first - began, (last - first) / (num_tokens - times[0][1])


if __name__ == "__main__":
    main()
