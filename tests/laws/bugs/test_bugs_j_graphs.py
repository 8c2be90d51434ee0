"""Cases of replayed steps (J of docs/laws.md; A9, A10, F9): lifetime, capture-time state, formats.

In:  the engine's own graphs, whose recordings are replayed without CUDA, in float64. Oracle: the
     same step run eagerly. The same laws on CUDA: tests/gpu/test_engine.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.engine import step_rules
from gnomon.engine.assembly import Parts
from gnomon.engine.batch import Batch, DecodeBatch
from gnomon.engine.core import EngineCore
from gnomon.engine.graphs import CudaRecorder, DecodeGraphs
from tests.engine.graph_engine import graph_core, graph_parts
from tests.engine.static_kernels import StaticRecorder
from tests.engine.test_graphs import first_rows
from tests.engine.tiny_engine import outputs, prompt, request

LENGTHS = (50, 59, 68, 77, 86, 95, 104, 113)  # below and above index_topk = 64


def started(parts: Parts, lengths: tuple[int, ...] = LENGTHS) -> DecodeBatch:
    """The first decode step of prompts of these lengths, built and not run."""
    core = EngineCore(parts)
    core.add([request(f"r{i}", prompt(n, i), 20) for i, n in enumerate(lengths)])
    core.step()
    batch = parts.builder.build(parts.scheduler.schedule())
    assert isinstance(batch, DecodeBatch)
    return batch


def graphs_of(parts: Parts) -> DecodeGraphs:
    graphs = parts.runner._graphs
    assert graphs is not None
    return graphs


def assert_replays(parts: Parts, batch: DecodeBatch, expected: Tensor) -> None:
    """The replay gives the first rows of these logits; no row is flagged, padding included."""
    logits, _ = graphs_of(parts).replay(batch)
    torch.testing.assert_close(logits, expected[: len(logits)], rtol=1e-9, atol=1e-9)
    _, flags = graphs_of(parts)._captured[batch.bucket].outputs
    assert not bool(flags.any())


def test_a9_a_step_above_the_captured_range_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rules, "decode_buckets", lambda *_: (1, 2, 4))
    requests = [request(f"r{i}", prompt(n, i), 6 + i % 3) for i, n in enumerate(LENGTHS[:6])]
    parts, kinds = graph_parts(), []
    run = parts.runner.run

    def watching(batch: Batch | DecodeBatch, *rest: Any) -> Any:
        kinds.append((type(batch), len(batch.samples)))
        return run(batch, *rest)

    monkeypatch.setattr(parts.runner, "run", watching)
    assert outputs(EngineCore(parts), requests) == outputs(graph_core(False), requests)
    assert (Batch, 6) in kinds
    assert {rows for kind, rows in kinds if kind is DecodeBatch} <= {1, 2, 3, 4}
    assert DecodeBatch in {kind for kind, _ in kinds}


def test_a10_six_live_rows_in_a_graph_of_eight() -> None:
    """First behind them what padding holds, then what eight live rows left there."""
    parts = graph_parts()
    batch = started(parts)
    expected = parts.runner.run(batch.eager()).logits
    six = first_rows(batch, 6)
    assert_replays(parts, six, expected)
    assert_replays(parts, batch, expected)
    assert_replays(parts, six, expected)


def test_f9_packed_fp8_in_a_graph_is_packed_fp8() -> None:
    """Rounded entries are discrete: a graph that read or wrote other codes would be far off."""
    parts = graph_parts(kv_layout="fp8")
    batch = started(parts)
    expected = parts.runner.run(batch.eager()).logits
    written = {name: pool.storage.clone() for name, pool in parts.cache.pools.items()}
    for pool in parts.cache.pools.values():
        pool.layout.write(pool, torch.from_numpy(batch.slots["tokens"]), _zeros(pool, len(LENGTHS)))
    assert_replays(parts, batch, expected)
    for name, pool in parts.cache.pools.items():
        assert torch.equal(pool.storage, written[name]), name


def _zeros(pool: Any, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, pool.layout.dim, dtype=torch.float64)


def test_j1_sizes_take_turns_while_memory_is_reused() -> None:
    parts = graph_parts()
    batch = started(parts)
    expected = parts.runner.run(batch.eager()).logits
    kept = []
    for rows in (4, 2, 8, 2, 4):
        few = first_rows(batch, rows)
        assert_replays(parts, replaced(few, rows), expected)
        gc.collect()
        kept.append([torch.full((size,), torch.nan) for size in (64, 512, 4096)])


def replaced(batch: DecodeBatch, bucket: int) -> DecodeBatch:
    """The batch in another bucket."""
    batch = first_rows(batch, len(batch.request_ids))
    object.__setattr__(batch, "bucket", bucket)
    return batch


def test_j2_kernels_are_compiled_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is lazy happens in a run of the same work that is not captured."""
    is_capturing, seen = [False], []

    class Graph:
        def capture_begin(self, *_: Any, **__: Any) -> None:
            is_capturing[0] = True

        def capture_end(self) -> None:
            is_capturing[0] = False

        def replay(self) -> None: ...

    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "graph_pool_handle": lambda: 0,
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    outputs = (torch.zeros(1), torch.zeros(1))
    CudaRecorder().record(lambda: seen.append(is_capturing[0]) or outputs)
    assert seen == [False, True]
    assert not is_capturing[0]


def test_j3_nothing_that_a_replay_reads_moves() -> None:
    """Neither buffers nor outputs, while requests grow past pages and past index_topk."""
    parts = graph_parts()
    core, graphs = EngineCore(parts), graphs_of(parts)
    core.add([request(f"r{i}", prompt(n, i), 30) for i, n in enumerate((3, 40, 60))])

    def addresses() -> list[int]:
        outputs = [out for one in graphs._captured.values() for out in one.outputs]
        pools = [pool.storage for pool in parts.cache.pools.values()]
        return [*graphs.buffers.addresses(), *(held.data_ptr() for held in (*outputs, *pools))]

    before = addresses()
    while core.has_work:
        core.step()
        assert addresses() == before
    gc.collect()
    assert addresses() == before


def test_j4_rows_behind_a_small_step_read_nothing_of_the_large_one() -> None:
    """The pages of the large step's other requests are poisoned before the small one runs."""
    parts = graph_parts()
    batch = started(parts)
    expected = parts.runner.run(batch.eager()).logits
    assert_replays(parts, batch, expected)
    gone = {int(page) for page in batch.pages["tokens"][5:].flat} - {0}
    parts.cache.poison("tokens", sorted(gone - {int(p) for p in batch.pages["tokens"][:5].flat}))
    assert_replays(parts, first_rows(batch, 5), expected)


def test_j8_contexts_of_any_length_replay_the_same_graphs() -> None:
    """300 steps across pages and index_topk: nothing is recorded after the start."""

    class Counting(StaticRecorder):
        calls = 0

        def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            self.calls += 1
            return super().record(work)

    recorder = Counting()
    parts = graph_parts(max_num_seqs=2)
    graphs = graphs_of(parts)
    graphs._recorder = recorder
    graphs.capture(lambda *_: None)
    assert recorder.calls == len(graphs.rules.buckets) == 2
    held = len(graphs._captured)
    found = outputs(EngineCore(parts), [request("a", prompt(2), 300), request("b", prompt(70), 9)])
    assert len(found["a"]) == 300
    assert recorder.calls == 2
    assert len(graphs._captured) == held
