"""`gnomon bench serve`: latency and throughput of a running OpenAI-compatible server.

In:  a URL and ServeSettings. Out: ServeResult: of every request its time to the first token, the
     gaps between tokens, its end; percentiles, throughput, goodput.
Requests are completions over random token ids, so that no prefix is shared, streamed, one thread
and connection each. They come as fast as ``concurrency`` allows, or at random times of a mean rate.
Times are the client's: first token is the first event with text or a token, after the request was
sent. Not here: the display (cli/bench.py), starting a server (startup.py).
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated as A
from typing import Any
from urllib.parse import urlsplit

from gnomon.engine.flags import Flag, check_flags
from gnomon.errors import ConfigError, GnomonError

TIMEOUT_S = 600.0
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

    ``num_tokens``: as the server counts them; an event can hold more than one.
    """

    sent: float
    arrivals: tuple[float, ...] = ()
    num_tokens: int = 0
    error: str = ""

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
        """Times between neighbouring events."""
        return [(b - a) * 1e3 for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class ServeResult:
    """All answers of a run of ``seconds``."""

    settings: ServeSettings
    answers: tuple[Answer, ...]
    seconds: float
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
    client = _Client(url, model, api_key)
    draw = random.Random(settings.seed)
    prompts = [
        [draw.randint(FIRST_ID, LAST_ID) for _ in range(settings.input_len)]
        for _ in range(settings.num_requests)
    ]
    starts = list(_arrivals(draw, settings))
    begin, lock, done = time.perf_counter(), threading.Lock(), 0

    def ask(number: int) -> Answer:
        nonlocal done
        wait = starts[number] - (time.perf_counter() - begin)
        if wait > 0:
            time.sleep(wait)
        answer = client.complete(prompts[number], settings.output_len, begin)
        with lock:
            done += 1
            on_done(done)
        return answer

    with ThreadPoolExecutor(settings.concurrency) as pool:
        answers = tuple(pool.map(ask, range(settings.num_requests)))
    return ServeResult(settings, answers, time.perf_counter() - begin)


def _arrivals(draw: random.Random, settings: ServeSettings) -> Iterator[float]:
    now = 0.0
    for _ in range(settings.num_requests):
        yield now
        now += draw.expovariate(settings.request_rate) if settings.request_rate else 0.0


class _Client:
    """One connection per request; knows the server's address and the model's name."""

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"url is {url!r}: give it as http://host:port.")
        self._host, self._port = parts.hostname, parts.port
        secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model or self._served_model()

    def _served_model(self) -> str:
        """The first model that the server names. GnomonError if it does not answer."""
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", f"{self._base}/v1/models", headers=self._headers)
            return str(json.loads(connection.getresponse().read())["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise GnomonError(
                f"{self._host}:{self._port} does not name its models ({error}); is a server "
                "running there? If so, give --served-model."
            ) from None
        finally:
            connection.close()

    def complete(self, prompt: list[int], num_tokens: int, begin: float) -> Answer:
        """Stream one completion of exactly ``num_tokens``."""
        fields = {
            "model": self._model, "prompt": prompt, "max_tokens": num_tokens, "stream": True,
            "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }  # fmt: skip
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        sent = time.perf_counter() - begin
        try:
            body = json.dumps(fields).encode()
            connection.request("POST", f"{self._base}/v1/completions", body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(500).decode(errors="replace")
                return Answer(sent, error=f"HTTP {response.status}: {text}")
            arrivals, counted = _token_times(response, begin)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return Answer(sent, error=f"{type(error).__name__}: {error}")
        finally:
            connection.close()
        fault = "" if arrivals else "the stream held no token"
        return Answer(sent, arrivals, counted or len(arrivals), fault)


def _token_times(response: http.client.HTTPResponse, begin: float) -> tuple[tuple[float, ...], int]:
    """(arrival of every event with text or tokens, tokens by the server's count or 0).

    A token may have no text of its own (half a character, an id beyond the tokenizer's).
    """
    arrivals: list[float] = []
    counted = 0
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            raise ValueError(str(event["error"])[:300])
        choices = event.get("choices", ())
        if any(choice.get("text") or choice.get("token_ids") for choice in choices):
            arrivals.append(time.perf_counter() - begin)
        counted = (event.get("usage") or {}).get("completion_tokens", counted)
    return tuple(arrivals), counted


def _percentile(values: list[float], share: int) -> float:
    ordered = sorted(values)
    return ordered[round(share / 100 * (len(ordered) - 1))]
