"""Captured decode = eager decode, replayed without CUDA: one plan, refreshed buffers.

The oracle is the same engine without graphs (whose own truth is elsewhere): float64, so that equal
tokens mean equal computation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gnomon.attention.decode_plan import bucket_of, decode_buckets
from gnomon.engine.batch import Batch, DecodeBatch
from gnomon.engine.core import EngineCore
from gnomon.engine.graph_buffers import GraphBuffers
from gnomon.engine.runner import Taps
from gnomon.errors import GeometryError
from tests.engine.graph_engine import graph_core, graph_parts, no_waiting
from tests.engine.tiny_engine import outputs, prompt, request, run, tokens

GLM = "random:glm_moe_dsa,layers=4,topk=32"


def mixed_requests() -> list:
    """Prompts below and above index_topk = 64, more than seats, some random, one with penalties."""
    lengths = (3, 40, 64, 65, 90, 130, 17, 5, 71, 100, 33, 2, 80, 61)
    made = [request(f"r{i}", prompt(n, i), 6 + i % 9) for i, n in enumerate(lengths)]
    made.append(request("warm", prompt(70, 20), 12, temperature=0.9, top_p=0.8, seed=5))
    made.append(request("often", prompt(20, 21), 12, repetition_penalty=1.4, logprobs=2))
    return made


@pytest.mark.parametrize("model", ["random:deepseek_v32,layers=2", GLM])
@pytest.mark.parametrize("layout", ["auto", "fp8"])
def test_tokens_are_those_of_eager_steps(model, layout):
    flags = {"model": model, "kv_layout": layout}
    captured, eager = graph_core(**flags), graph_core(has_graphs=False, **flags)
    assert outputs(captured, mixed_requests()) == outputs(eager, mixed_requests())


def test_decode_steps_do_replay_and_prompts_do_not():
    parts = graph_parts()
    seen = []
    run_batch = parts.runner.run
    core = EngineCore(parts)
    parts.runner.run = lambda batch, *rest: seen.append(type(batch)) or run_batch(batch, *rest)
    run(core, [request("a", prompt(30), 5), request("b", prompt(9, 1), 5)])
    assert seen == [Batch] + [DecodeBatch] * 4


def test_a_prompt_that_was_scored_decodes_by_graphs():
    parts = graph_parts()
    seen = []
    run_batch = parts.runner.run
    core = EngineCore(parts)
    parts.runner.run = lambda batch, *rest: seen.append(type(batch)) or run_batch(batch, *rest)
    run(core, [request("a", prompt(30), 4, prompt_logprobs=1)])
    assert seen == [Batch] + [DecodeBatch] * 3


def test_a_decode_step_reads_nothing_back_before_it_lands():
    parts = graph_parts()
    core = EngineCore(parts)
    core.add([request(f"r{i}", prompt(60 + 3 * i, i), 20) for i in range(5)])
    core.step()
    schedule = parts.scheduler.schedule()
    batch = parts.builder.build(schedule)
    assert isinstance(batch, DecodeBatch)
    with no_waiting():
        output = parts.runner.run(batch)
        pending = parts.sampler.launch(output.logits, batch.samples)
    assert pending.token_ids.shape == (5,)


def test_the_guard_would_notice():
    with no_waiting(), pytest.raises(AssertionError, match="tolist"):
        torch.zeros(3).tolist()


@pytest.mark.parametrize("num_live", [0, 1, 5, 8])
def test_padding_of_a_bucket_changes_nothing_and_is_finite(num_live):
    """The same rows in a bucket of 8: none, one, some and all of them live."""
    parts = graph_parts()
    core = EngineCore(parts)
    core.add([request(f"r{i}", prompt(50 + 9 * i, i), 20) for i in range(8)])
    core.step()
    batch = parts.builder.build(parts.scheduler.schedule())
    expected = parts.runner.run(batch.eager()).logits
    graphs = parts.runner._graphs
    few = first_rows(batch, num_live)
    logits, flags = graphs.replay(few)
    assert logits.shape[0] == num_live
    torch.testing.assert_close(logits, expected[:num_live], rtol=1e-9, atol=1e-9)
    assert not bool(graphs._captured[8].outputs[1].any())
    assert not bool(flags.any())


def first_rows(batch: DecodeBatch, count: int) -> DecodeBatch:
    """The first rows of a batch, in the same bucket."""
    return DecodeBatch(
        bucket=batch.bucket,
        token_ids=batch.token_ids[:count],
        kv_len=batch.kv_len[:count],
        slots={name: slots[:count] for name, slots in batch.slots.items()},
        pages={name: pages[:count] for name, pages in batch.pages.items()},
        samples=batch.samples[:count],
        request_ids=batch.request_ids[:count],
        eager=batch.eager,
    )


def test_a_refresh_moves_no_buffer_and_satisfies_the_geometry():
    parts = graph_parts()
    core = EngineCore(parts)
    core.add([request(f"r{i}", prompt(40 + i, i), 30) for i in range(3)])
    graphs = parts.runner._graphs
    before = graphs.buffers.addresses()
    while core.has_work:
        core.step()
        for captured in graphs._captured.values():
            if captured.geometry.rows.num_rows == 4:
                captured.geometry.check()
    assert graphs.buffers.addresses() == before


def test_a_poisoned_request_fails_alone_in_a_replayed_step():
    parts = graph_parts()
    core = EngineCore(parts)
    core.add([request(name, prompt(20, i), 6) for i, name in enumerate(("good", "bad", "fine"))])
    core.step()
    (victim,) = [state for state in parts.scheduler._running if state.request_id == "bad"]
    parts.cache.poison("tokens", [int(victim.table.views[0][0])])
    found = {}
    while core.has_work:
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)
    assert found["bad"][-1].finish_reason == "error"
    assert len(tokens(found["good"])) == len(tokens(found["fine"])) == 5


def test_who_listens_gets_eager_steps():
    class Tap:
        wants_every_row = False
        calls = 0

        def logits(self, request_ids, positions, logits):
            self.calls += 1

    core, tap = graph_core(), Tap()
    core.taps = Taps(logits=tap)
    run(core, [request("a", prompt(5), 4)])
    assert tap.calls == 4


def test_sampled_checks_look_at_eager_steps_in_between():
    core = graph_core(check="sampled")
    assert len(outputs(core, [request("a", prompt(70), 300)])["a"]) == 300
    assert core.stats().checks > 0
    assert core.stats().check_violations == 0


def test_buckets():
    assert decode_buckets(1) == (1,)
    assert decode_buckets(20) == (1, 2, 4, 8, 16, 20)
    assert decode_buckets(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert decode_buckets(40, 16) == (16, 32, 48)
    for rows in range(1, 41):
        bucket = bucket_of(rows, decode_buckets(40))
        assert rows <= bucket <= 2 * rows
    assert bucket_of(41, decode_buckets(40)) is None
    assert bucket_of(3, (1, 8)) is None  # more than half would be padding
    assert bucket_of(0, (1, 2)) == 1


def test_buffers_refuse_what_they_cannot_hold():
    buffers = GraphBuffers(["tokens"], 4, 3, torch.device("cpu"))
    batch = decode_batch(bucket=4, num_rows=2, num_pages=4)
    with pytest.raises(GeometryError, match="cannot hold"):
        buffers.refresh(batch)


def decode_batch(bucket: int, num_rows: int, num_pages: int) -> DecodeBatch:
    """A batch of rows at position 1 of pages 1, 2, ..."""
    pages = np.arange(1, num_rows * num_pages + 1, dtype=np.int32).reshape(num_rows, num_pages)
    return DecodeBatch(
        bucket=bucket,
        token_ids=np.arange(num_rows),
        kv_len=np.full(num_rows, 2, np.int32),
        slots={"tokens": pages[:, 0].astype(np.int64) * 16 + 1},
        pages={"tokens": pages},
        samples=(),
        request_ids=tuple(map(str, range(num_rows))),
        eager=lambda: None,
    )


def test_buffers_take_tokens_from_the_device_where_they_are_told_to():
    buffers = GraphBuffers(["tokens"], 8, 3, torch.device("cpu"))
    buffers.sampled.copy_(torch.arange(100, 108))
    batch = decode_batch(bucket=4, num_rows=3, num_pages=2)
    buffers.refresh(batch, np.array([-1, 5, 0]))
    assert buffers.token_ids(4).tolist() == [0, 105, 100, 0]
    buffers.refresh(batch)
    assert buffers.token_ids(4).tolist() == [0, 1, 2, 0]
