"""`gnomon bench serve`: latency and throughput of a running OpenAI-compatible server.

In:  a URL and ServeSettings. Out: ServeResult: of every request its time to the first token, the
     gaps between tokens, its end; percentiles, throughput, goodput; how busy the client was.
Requests are completions over random token ids, so that no prefix is shared, streamed, a connection
each. They come as fast as ``concurrency`` allows, or at random times of a mean rate.
Times are the client's: first token is the first event with text or a token, after the request was
sent. Not here: connections and bytes (serve_client.py), the display (cli), starting a server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated as A

from gnomon.bench.serve_client import ClientLoad, LoadMeter, Pieces, StreamClient, read_events
from gnomon.engine.flags import Flag, check_flags

FIRST_ID, LAST_ID = 1000, 3000  # ids that every tokenizer of these models has, none of them special


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What is asked of the server."""

    num_requests: A[int, Flag("requests in all", least=1)] = 64
    concurrency: A[int, Flag("requests at a time, at most", least=1)] = 16
    request_rate: A[
        float,
        Flag("mean arrivals a second, at random times; 0: as fast as seats get free", least=0),
    ] = 0.0
    input_len: A[int, Flag("prompt tokens of a request", least=1)] = 512
    output_len: A[int, Flag("output tokens of a request", least=1)] = 64
    slo_ttft_ms: A[float, Flag("a request is good if its first token comes this soon", least=0)] = (
        2000.0
    )
    slo_tpot_ms: A[float, Flag("and if a token takes this long in the mean, at most", least=0)] = (
        100.0
    )
    seed: A[int, Flag("seed of prompts and arrivals", least=0)] = 0

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds since the run began: ``sent``, each event's arrival. ``error``: why it failed.

    ``num_tokens``: as the server counts them. ``event_tokens``: how many came with each event, as
    far as their ids were sent; one each otherwise.
    """

    sent: float
    arrivals: tuple[float, ...] = ()
    num_tokens: int = 0
    error: str = ""
    event_tokens: tuple[int, ...] = ()

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return (self.arrivals[0] - self.sent) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Mean time of a token after the first."""
        gaps = max(1, self.num_tokens - 1)
        return (self.arrivals[-1] - self.arrivals[0]) / gaps * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Times between neighbouring tokens: of tokens of one event, the first has waited for all.

        Answers of different batching compare so: the mean is always (last - first) / (tokens - 1).
        """
        counts = self.event_tokens or (1,) * len(self.arrivals)
        gaps = [0.0] * (counts[0] - 1) if counts else []
        for count, (before, now) in zip(counts[1:], pairwise(self.arrivals), strict=True):
            gaps += [(now - before) * 1e3, *[0.0] * (count - 1)]
        return gaps


@dataclass(frozen=True, slots=True)
class ServeResult:
    """All answers of a run of ``seconds``, and how busy the client was with them."""

    settings: ServeSettings
    answers: tuple[Answer, ...]
    seconds: float
    client: ClientLoad = field(default_factory=lambda: ClientLoad(0.0, 0.0, 0.0))
    good: tuple[Answer, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "good", tuple(a for a in self.answers if not a.error))

    def percentiles(self) -> dict[str, dict[str, float]]:
        """p50, p90, p99 of ttft_ms, tpot_ms, itl_ms; empty without an answer."""
        series = {
            "ttft_ms": [answer.ttft_ms for answer in self.good],
            "tpot_ms": [answer.tpot_ms for answer in self.good],
            "itl_ms": [gap for answer in self.good for gap in answer.gaps_ms],
        }
        return {
            name: {f"p{share}": _percentile(values, share) for share in (50, 90, 99)}
            for name, values in series.items()
            if values
        }

    def rates(self) -> dict[str, float]:
        """Per second: requests, output tokens, all tokens, requests that keep both bounds."""
        settings = self.settings
        outputs = sum(answer.num_tokens for answer in self.good)
        kept = [
            answer
            for answer in self.good
            if answer.ttft_ms <= settings.slo_ttft_ms and answer.tpot_ms <= settings.slo_tpot_ms
        ]
        counts = {
            "requests_s": len(self.good),
            "output_tokens_s": outputs,
            "total_tokens_s": outputs + settings.input_len * len(self.good),
            "goodput_requests_s": len(kept),
        }
        return {name: count / self.seconds for name, count in counts.items()}


def bench_serve(
    url: str,
    model: str,
    settings: ServeSettings,
    api_key: str | None = None,
    on_done: Callable[[int], None] = lambda done: None,
) -> ServeResult:
    """Run all requests. ConfigError for a URL that is none; failures are in the answers."""
    client = StreamClient(url, model, api_key)
    draw = random.Random(settings.seed)
    requests = []
    for _ in range(settings.num_requests):
        prompt = [draw.randint(FIRST_ID, LAST_ID) for _ in range(settings.input_len)]
        requests.append(client.request(prompt, settings.output_len))
    starts = list(_arrivals(draw, settings))
    begin, end, taken, load = asyncio.run(
        _ask_all(client, requests, starts, settings.concurrency, on_done)
    )
    answers = tuple(answer_of(one, begin) for one in taken)
    return ServeResult(settings, answers, end - begin, load)


def _arrivals(draw: random.Random, settings: ServeSettings) -> Iterator[float]:
    now = 0.0
    for _ in range(settings.num_requests):
        yield now
        now += draw.expovariate(settings.request_rate) if settings.request_rate else 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of one request: when it was sent, the answer's pieces, or why there are none."""

    sent: float
    pieces: Pieces
    error: str = ""


async def _ask_all(
    client: StreamClient,
    requests: Sequence[bytes],
    starts: Sequence[float],
    concurrency: int,
    on_done: Callable[[int], None],
) -> tuple[float, float, list[Taken], ClientLoad]:
    """(begin, end, what came of each request, how busy the client was)."""
    meter, begin = LoadMeter(), time.perf_counter()
    taken: dict[int, Taken] = {}
    numbers = iter(range(len(requests)))

    async def work() -> None:
        for number in numbers:
            wait = begin + starts[number] - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            sent = time.perf_counter()
            try:
                taken[number] = Taken(sent, await client.send(requests[number]))
            except OSError as error:
                taken[number] = Taken(sent, [], f"{type(error).__name__}: {error}")
            on_done(len(taken))

    meter.start()
    await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
    end = time.perf_counter()
    return begin, end, [taken[number] for number in range(len(requests))], meter.stop()


def answer_of(taken: Taken, begin: float) -> Answer:
    """What an answer's bytes say. A token may have no text of its own (half a character)."""
    sent = taken.sent - begin
    arrivals: list[float] = []
    tokens: list[int] = []
    counted = 0
    try:
        for arrived, event in read_events(taken.pieces) if not taken.error else ():
            choices = event.get("choices", ())
            num_tokens = sum(len(choice.get("token_ids") or ()) for choice in choices)
            if num_tokens or any(choice.get("text") for choice in choices):
                arrivals.append(arrived - begin)
                tokens.append(num_tokens or 1)
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
    except ValueError as error:
        return Answer(sent, error=str(error))
    fault = taken.error or ("" if arrivals else "the stream held no token")
    return Answer(sent, tuple(arrivals), counted or sum(tokens), fault, tuple(tokens))


def _percentile(values: list[float], share: int) -> float:
    ordered = sorted(values)
    return ordered[round(share / 100 * (len(ordered) - 1))]
