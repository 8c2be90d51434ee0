"""Prefill captured between its attentions = eager prefill, replayed without CUDA.

The oracle is the same engine without graphs (whose own truth is elsewhere): float64, so that equal
tokens mean equal computation. Steps: fresh prompts, chunks behind a context, decode beside them.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import RowTensor, build_geometry
from gnomon.attention.plan import plan_step
from gnomon.attention.routes import Route
from gnomon.attention.transforms import pad_rows
from gnomon.engine import step_rules
from gnomon.engine.assembly import Parts
from gnomon.engine.batch import Batch
from gnomon.engine.core import EngineCore
from gnomon.engine.prefill_graphs import PrefillGraphs
from gnomon.engine.runner import Taps
from gnomon.errors import GeometryError
from tests.engine.graph_engine import graph_core, graph_parts
from tests.engine.test_graphs import mixed_requests
from tests.engine.tiny_engine import outputs, prompt, request, run, tokens

V32 = "random:deepseek_v32,layers=2"
GLM = "random:glm_moe_dsa,layers=4,topk=32"  # the fourth layer attends what the third chose
MOST = 64  # tokens of a step: long prompts come in chunks, beside those that decode


def captured_core(**flags: Any) -> EngineCore:
    return graph_core(captured_tokens=MOST, max_num_batched_tokens=MOST, **flags)


def eager_core(**flags: Any) -> EngineCore:
    return graph_core(False, max_num_batched_tokens=MOST, **flags)


def graphs_of(parts: Parts) -> PrefillGraphs:
    assert parts.runner._prefill is not None
    return parts.runner._prefill


def watched(core: EngineCore) -> list[Batch]:
    """The steps that graphs take from here on."""
    seen: list[Batch] = []
    graphs = graphs_of(core._parts)
    forward = graphs.forward

    def watching(batch: Batch, *rest: Any) -> Any:
        seen.append(batch)
        return forward(batch, *rest)

    graphs.forward = watching  # type: ignore[method-assign]  # an instance's own, for the test
    return seen


@pytest.mark.parametrize("model", [V32, GLM])
@pytest.mark.parametrize("layout", ["auto", "fp8"])
def test_tokens_are_those_of_eager_steps(model, layout):
    flags = {"model": model, "kv_layout": layout}
    captured = captured_core(**flags)
    seen = watched(captured)
    assert outputs(captured, mixed_requests()) == outputs(eager_core(**flags), mixed_requests())
    query_lens = [batch.geometry.requests.host.query_len for batch in seen]
    assert any(1 in lens and max(lens) > 1 for lens in query_lens), "a mixed step"
    longest = [max(batch.geometry.requests.host.kv_len) for batch in seen]
    assert max(longest) > MOST, "a chunk behind a context"
    assert {route for batch in seen for route in batch.plan.routes} == {Route.SPARSE, Route.DENSE}
    assert any(batch.plan.sparse and batch.plan.dense for batch in seen), "both in one step"


@pytest.mark.parametrize("model", [V32, GLM])
def test_lists_of_one_width_change_no_token(model, monkeypatch):
    """As on a GPU, where kernels are compiled for a width: also for rows that see few keys."""
    expected = outputs(eager_core(model=model), mixed_requests())
    of = step_rules.capabilities_of
    monkeypatch.setattr(
        step_rules, "capabilities_of", lambda given: replace(of(given), has_fixed_width=True)
    )
    for core in (captured_core(model=model), eager_core(model=model)):
        assert core._parts.builder.rules.capabilities.has_fixed_width
        assert outputs(core, mixed_requests()) == expected


@pytest.mark.parametrize("flags", [{"weights": "fp8"}, {"weights": "dequantise"}])
@pytest.mark.parametrize("model", [V32, GLM])
def test_fp8_weights(model, flags):
    flags = {"model": f"{model},fp8=true", "dtype": "float32", **flags}
    requests = [request(f"r{i}", prompt(n, i), 4) for i, n in enumerate((20, 50, 90))]
    captured, eager = captured_core(**flags), eager_core(**flags)
    seen = watched(captured)
    found, expected = run(captured, requests), run(eager, requests)
    assert len(seen) >= 3
    for name, deltas in expected.items():
        assert tokens(found[name]) == tokens(deltas)


def batch_of(parts: Parts, lengths: list[int]) -> Batch:
    """The step that prefills prompts of these lengths; without any, it has two padding rows.

    It is none that decodes, also where all prompts have one token.
    """
    rules, pages, next_page = parts.builder.rules, [], 1
    for length in lengths:
        count = -(-length // rules.page_size)
        pages.append(np.arange(next_page, next_page + count, dtype=np.int32))
        next_page += count
    live = build_geometry(
        lengths, lengths, {"tokens": pages}, page_size=rules.page_size, device=rules.device
    )
    geometry = pad_rows(live, sum(lengths) or 2)
    plan = plan_step(geometry, rules.dims, rules.capabilities, rules.budget)
    ids = [token for i, n in enumerate(lengths) for token in prompt(n, i)] or [0, 0]
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
    return Batch(
        token_ids=RowTensor(geometry.rows, torch.tensor(ids, device=rules.device)),
        geometry=geometry,
        plan=replace(plan, graph_key=None),
        logit_rows=ends.to(rules.device),
        samples=(),
        prompt_rows=(),
        request_ids=tuple(map(str, range(len(lengths)))),
    )


def hidden(parts: Parts, batch: Batch, bucket: int | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(hidden, NaN flags, entries in the cache) of a step; eager where `bucket` is None."""
    ops = parts.runner.operators(batch.plan)
    for pool in parts.cache.pools.values():
        pool.storage.zero_()
    if bucket is None:
        output = parts.runner._run_eagerly(batch, Taps(), ops, None)
    else:
        output = graphs_of(parts).forward(batch, ops, bucket)
    pools = parts.cache.pools.values()
    every = torch.arange(256 * parts.builder.rules.page_size)
    written = [pool.layout.gather(pool, every).clone() for pool in pools]
    return output.hidden.data.clone(), output.nan_rows.data.clone(), written


@pytest.mark.parametrize("model", [V32, GLM])
@pytest.mark.parametrize("lengths", [[], [1], [5], [3, 1, 9], [64], [20, 40, 4]])
def test_padding_of_a_bucket_changes_nothing(model, lengths):
    """None, one, some and all of 64 rows live, before and behind a step that fills the bucket."""
    parts = graph_parts(captured_tokens=MOST, model=model)
    batch, full = batch_of(parts, lengths), batch_of(parts, [MOST])
    expected = hidden(parts, batch, None)
    for _ in range(2):
        found = hidden(parts, batch, MOST)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        graphs = graphs_of(parts)
        assert bool(graphs.buffers.stream(MOST).isfinite().all())
        assert not bool(graphs.buffers.attended(MOST)[batch.geometry.rows.num_rows :].any())
        hidden(parts, full, MOST)


@pytest.mark.parametrize("num_rows", [4, 8, 9, 13, 32, 33, 64])
def test_every_bucket_gives_the_same_rows(num_rows):
    parts = graph_parts(captured_tokens=MOST)
    batch = batch_of(parts, [num_rows])
    bucket = graphs_of(parts).bucket_of(num_rows)
    assert bucket is not None
    torch.testing.assert_close(
        hidden(parts, batch, bucket), hidden(parts, batch, None), rtol=1e-9, atol=1e-9
    )


def test_rows_behind_a_small_step_hold_nothing_of_a_poisoned_large_one():
    parts = graph_parts(captured_tokens=MOST)
    few, full = batch_of(parts, [9, 11]), batch_of(parts, [MOST])
    expected = hidden(parts, few, None)
    weight = parts.runner.model.embedding
    kept = weight.clone()
    weight.fill_(torch.nan)
    assert not bool(hidden(parts, full, MOST)[0].isfinite().any())
    weight.copy_(kept)
    torch.testing.assert_close(hidden(parts, few, MOST), expected, rtol=1e-9, atol=1e-9)
    assert bool(graphs_of(parts).buffers.stream(MOST).isfinite().all())


def test_nothing_that_a_replay_reads_moves():
    core = captured_core()
    graphs = graphs_of(core._parts)

    def addresses() -> list[int]:
        held = [pool.storage for pool in core._parts.cache.pools.values()]
        for captured in graphs._captured.values():
            held += captured.rotations.tensors()
        return [*graphs.buffers.addresses(), *(tensor.data_ptr() for tensor in held)]

    before = addresses()
    run(core, mixed_requests())
    gc.collect()
    assert addresses() == before


def test_sizes_take_turns_while_memory_is_reused():
    parts = graph_parts(captured_tokens=32)
    batches = {rows: batch_of(parts, [rows]) for rows in (13, 7, 30)}
    expected = {rows: hidden(parts, batch, None) for rows, batch in batches.items()}
    kept = []
    for rows in (13, 7, 13, 30, 7, 13):
        bucket = graphs_of(parts).bucket_of(rows)
        found = hidden(parts, batches[rows], bucket)
        torch.testing.assert_close(found, expected[rows], rtol=1e-9, atol=1e-9)
        gc.collect()
        kept.append([torch.full((size,), torch.nan) for size in (64, 512, 4096)])


def test_prompts_are_scored_as_by_eager_steps():
    requests = [request(f"r{i}", prompt(n, i), 3, prompt_logprobs=2) for i, n in enumerate((9, 80))]
    captured = captured_core()
    seen = watched(captured)
    found, expected = run(captured, requests), run(eager_core(), requests)
    assert any(batch.prompt_rows for batch in seen)
    for name, deltas in expected.items():
        ours, theirs = found[name][0].prompt_logprobs, deltas[0].prompt_logprobs
        assert len(ours) == len(theirs)
        for one, other in zip(ours[1:], theirs[1:], strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-6)


def test_a_poisoned_request_fails_alone():
    core = captured_core(enable_prefix_caching=False)
    seen = watched(core)
    core.add([request("bad", prompt(100, 1), 6), request("good", prompt(20), 6)])
    core.step()
    (victim,) = [state for state in core._parts.scheduler._running if state.request_id == "bad"]
    core._parts.cache.poison("tokens", [int(victim.table.views[0][0])])
    found: dict[str, list[Any]] = {}
    while core.has_work:
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)
    assert len(seen) == 2
    assert found["bad"][-1].finish_reason == "error"
    assert found["good"][-1].finish_reason == "length"


def test_who_listens_gets_eager_steps():
    class Tap:
        wants_every_row = True
        calls = 0

        def logits(self, request_ids, positions, logits):
            self.calls += 1

    core, tap = captured_core(), Tap()
    seen = watched(core)
    core.taps = Taps(logits=tap)
    run(core, [request("a", prompt(30), 2)])
    assert tap.calls == 2
    assert seen == []


def test_sampled_checks_look_at_eager_steps_in_between():
    core = captured_core(check="sampled", max_num_seqs=2)
    seen = watched(core)
    requests = [request(f"r{i}", prompt(12, i), 1) for i in range(300)]
    assert {len(ids) for ids in outputs(core, requests).values()} == {1}
    assert core.stats().checks > 0
    assert core.stats().check_violations == 0
    assert 140 < len(seen) < 150  # of 150 steps


def test_a_step_that_would_be_mostly_padding_or_is_too_long_runs_eagerly():
    parts = graph_parts(captured_tokens=32)
    graphs = graphs_of(parts)
    assert graphs.rules.buckets == (8, 16, 32)
    assert [graphs.bucket_of(rows) for rows in (1, 3, 4, 8, 9, 32, 33)] == [
        None, None, 8, 8, 16, 32, None,
    ]  # fmt: skip
    batch = batch_of(parts, [40])
    assert not parts.runner.captures(batch)
    with pytest.raises(GeometryError, match="no graph takes 40 rows"):
        graphs.forward(batch, parts.runner.operators(batch.plan))
    with pytest.raises(GeometryError, match="cannot hold 40 rows"):
        graphs.buffers.refresh(batch, 32)


def test_token_ids_of_another_step_are_refused():
    """Guards: nothing goes on with a companion of another axis, as eagerly."""
    parts = graph_parts(captured_tokens=32)
    batch, other = batch_of(parts, [16]), batch_of(parts, [16])
    mixed = replace(batch, token_ids=other.token_ids)
    with pytest.raises(GeometryError):
        graphs_of(parts).forward(mixed, parts.runner.operators(mixed.plan))
