"""The metrics page: what the engine counts, read when asked, and what only the server sees.

In:  EngineStats at each scrape; the server's own observations (times, lengths, answers).
Out: text for Prometheus, from a registry of its own. Names are those that dashboards for vLLM
     know, with the prefix gnomon_. Units: seconds, tokens; usage of the cache is 0 to 1.
Not here: the scheduler's counting (engine), the endpoint (status_routes.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gnomon.engine.messages import ShadowStats
from gnomon.server.engine_port import EnginePort

REASONS = ("stop", "length", "abort", "error")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _buckets(first: float, ratio: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{first * ratio**step:.3g}") for step in range(count))


_SECONDS = _buckets(0.001, 2.0, 21)  # 1 ms to 17 min
_TOKEN_SECONDS = _buckets(0.0005, 1.6, 20)  # 0.5 ms to 3.8 s
_LENGTHS = _buckets(1, 2.0, 21)  # 1 to 1 Mi tokens


class ServerMetrics:
    """The registry of one app and the histograms that the endpoints feed."""

    def __init__(self, engine: EnginePort) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self._success = Counter(
            "gnomon_request_success",
            "Choices that ended, by reason.",
            ["finished_reason"],
            registry=self.registry,
        )
        for reason in REASONS:
            self._success.labels(reason)  # shows 0 from the start
        self._answers = Counter(
            "gnomon_http_requests",
            "Answers of the server, by status.",
            ["status"],
            registry=self.registry,
        )
        histogram = self._histogram
        self.time_to_first_token = histogram("time_to_first_token_seconds", _SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", _SECONDS)
        self.prefill_time = histogram("request_prefill_time_seconds", _SECONDS)
        self.inter_token_latency = TokenTimes("inter_token_latency_seconds", _TOKEN_SECONDS)
        self.registry.register(self.inter_token_latency)
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", _TOKEN_SECONDS
        )
        self.decode_time = histogram("request_decode_time_seconds", _SECONDS)
        self.e2e_latency = histogram("e2e_request_latency_seconds", _SECONDS)
        self.prompt_length = histogram("request_prompt_tokens", _LENGTHS)
        self.generation_length = histogram("request_generation_tokens", _LENGTHS)

    def count_finish(self, reason: str) -> None:
        """One choice has ended."""
        self._success.labels(reason).inc()

    def count_answer(self, status: int) -> None:
        """One HTTP answer has begun."""
        self._answers.labels(str(status)).inc()

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"gnomon_{name}",
            f"{name.replace('_', ' ')}.",
            buckets=buckets,
            registry=self.registry,
        )


class TokenTimes(Collector):
    """A histogram that is fed once per token of every stream: no locks, and many at a time.

    It belongs to the event loop's thread, as the page does that reads it.
    """

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` tokens took so long each."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        totals = accumulate(self._counts)
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        yield HistogramMetricFamily(
            f"gnomon_{self._name}",
            f"{self._name.replace('_', ' ')}.",
            buckets=[(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)],
            sum_value=self._sum,
        )


class _EngineCollector(Collector):
    """Reads the engine's last known counters at each scrape; nothing is kept twice."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []  # so that registering does not ask the engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield _gauge("engine_healthy", "1 while the engine runs.", float(self._engine.is_healthy))
        yield _gauge("num_requests_running", "Requests in the running batch.", stats.running)
        yield _gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the cache in use; 1 is full.", stats.kv_usage)
        yield _gauge("step_tokens", "Tokens that the last step computed.", stats.step_tokens)
        yield _counter("num_steps", "Steps.", stats.num_steps)
        yield _counter("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits)
        yield _counter("num_preemptions", "Requests put back to wait.", stats.num_preemptions)
        yield _counter("requests_rejected", "Requests that found a full queue.", stats.rejected)
        yield _counter("checks", "Operator calls that checked mode looked at.", stats.checks)
        yield _counter("check_violations", "Rules found broken by it.", stats.check_violations)
        if stats.shadow is not None:
            yield from _shadow_metrics(stats.shadow)


def _shadow_metrics(shadow: ShadowStats) -> Iterator[Metric]:
    """What shadow mode found: of steps in all, and of each operator by label."""
    yield _counter("shadow_steps", "Steps that the reference computed again.", shadow.steps)
    yield _counter("shadow_dropped", "Steps let go: the shadow was behind.", shadow.dropped)
    yield _counter("shadow_errors", "Steps that could not be compared.", shadow.errors)
    yield _counter("shadow_late_calls", "Calls that its time was too short for.", shadow.late_calls)
    families: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str], ...] = (
        (CounterMetricFamily, "cases", "Calls of an operator that were compared."),
        (CounterMetricFamily, "differing", "Of these, calls beyond the operator's tolerance."),
        (GaugeMetricFamily, "worst_difference", "Largest difference from the reference."),
        (GaugeMetricFamily, "worst_share", "Largest share of the tolerance; above 1 is wrong."),
    )
    for family, name, text in families:
        metric = family(f"gnomon_shadow_{name}", text, labels=["operator"])
        for operator, found in sorted(shadow.operators.items()):
            metric.add_metric([operator], float(getattr(found, name)))
        yield metric


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"gnomon_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"gnomon_{name}", text, value=value)
