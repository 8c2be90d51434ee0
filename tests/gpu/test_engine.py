"""The engine on a GPU: the CPU's tokens, graphs = eager, no waiting, no growth of memory.

Tiny random models of both families; the oracle is the same engine on the CPU (held to transformers
elsewhere), and for graphs the same engine without them. One process, about a minute with a cold
kernel cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gnomon.engine.assembly import put_together, survey
from gnomon.engine.batch import DecodeBatch
from gnomon.engine.captured_rows import DEFAULT_ROWS
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.engine.graphs import CudaRecorder
from gnomon.engine.memory_plan import StepSizes, graph_bytes, step_bytes
from gnomon.engine.warm_up import warm_up
from gnomon.models.sources import open_model
from tests.engine.static_kernels import static_operators
from tests.engine.test_graphs import first_rows
from tests.engine.tiny_engine import VOCAB, outputs, prompt, request, run, tokens

pytestmark = pytest.mark.gpu

V32, GLM = "random:deepseek_v32,layers=3", "random:glm_moe_dsa,layers=4,topk=32"
LENGTHS = (3, 40, 64, 65, 90, 130, 17, 5, 71, 100, 33, 2, 80, 61, 200, 63, 128, 31, 32, 250)


def core_on(device: str, *, has_static: bool = False, **flags: Any) -> EngineCore:
    """A tiny engine; with plain torch kernels that can be captured if `has_static`."""
    defaults = {
        "model": V32,
        "dtype": "float32",
        "num_kv_pages": 512,
        "block_size": 64 if device == "cuda" else 16,
        "max_num_seqs": 24,
        "device": device,
    }
    if device == "cuda":
        defaults["gpu_memory_utilization"] = 1.0  # other tests hold some of the device
    found = survey(EngineConfig.of(**{**defaults, **flags}), VOCAB)
    resolved = found.resolved
    loaded = open_model(
        found.source,
        resolved.dtype,
        resolved.device,
        None,
        resolved.max_model_len,
        has_fp8=resolved.has_fp8,
    )
    is_eager = bool(flags.get("enforce_eager"))
    if has_static:
        ops = static_operators()
        found = replace(found, ops=ops, graph_ops=None if is_eager else ops, decode_ops=None)
    return EngineCore(put_together(found, loaded))


def twenty(num_new: int = 16) -> list:
    """Twenty greedy prompts around index_topk, short and long."""
    return [request(f"r{i}", prompt(n, i), num_new) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def cpu_tokens() -> dict[str, dict[str, list[int]]]:
    return {model: outputs(core_on("cpu", model=model), twenty()) for model in (V32, GLM)}


def differing(found: dict[str, list[int]], expected: dict[str, list[int]]) -> list[str]:
    """Where two answers part, short enough to read."""
    lines = []
    for name, ids in expected.items():
        if found[name] != ids:
            pairs = zip(found[name], ids, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            lines.append(f"{name} (prompt {LENGTHS[int(name[1:])]}): from token {place}")
    return lines


@pytest.mark.parametrize("model", [V32, GLM])
@pytest.mark.parametrize("arm", ["torch eager", "default eager", "default", "static graphs"])
def test_fp32_tokens_are_those_of_the_cpu(model, arm, cpu_tokens):
    flags: dict[str, Any] = {"model": model}
    if arm == "torch eager":
        flags["attention_provider"] = "torch"
    if "eager" in arm:
        flags["enforce_eager"] = True
    core = core_on("cuda", has_static=arm == "static graphs", **flags)
    assert differing(outputs(core, twenty()), cpu_tokens[model]) == []


@pytest.mark.parametrize("layout", ["auto", "fp8"])
@pytest.mark.parametrize("has_static", [True, False])
def test_graphs_give_the_tokens_of_eager_steps(layout, has_static):
    flags = {"kv_layout": layout, "has_static": has_static}
    captured = core_on("cuda", **flags)
    eager = core_on("cuda", enforce_eager=True, **flags)
    requests = [*twenty(), request("warm", prompt(70, 20), 12, temperature=0.9, top_p=0.8, seed=5)]
    assert outputs(captured, requests) == outputs(eager, requests)


@pytest.mark.parametrize("model", [V32, GLM])
def test_bfloat16_runs_to_the_end(model):
    core = core_on("cuda", model=model, dtype="bfloat16")
    found = run(core, twenty(24))
    assert {name: len(tokens(deltas)) for name, deltas in found.items()} == {
        name: 24 for name in found
    }
    assert {deltas[-1].finish_reason for deltas in found.values()} == {"length"}


@pytest.mark.parametrize("model", [V32, GLM])
@pytest.mark.parametrize("layout", ["auto", "fp8"])
def test_fp8_weights_prefill_and_decode(model, layout):
    core = core_on("cuda", model=f"{model},fp8=true", dtype="bfloat16", kv_layout=layout)
    assert core._parts.runner.model.layers[0].attention.output.weight.codes.is_cuda
    batch = decode_batch(core, 8)
    runner = core._parts.runner
    eager = runner.run(batch.eager()).logits
    logits, flags = runner._graphs.replay(batch)
    assert not bool(flags.any())
    assert bool(logits.isfinite().all())
    torch.testing.assert_close(logits, eager, rtol=0.05, atol=0.1)
    again = core_on("cuda", model=f"{model},fp8=true", dtype="bfloat16", kv_layout=layout)
    assert {len(ids) for ids in outputs(again, twenty(24)).values()} == {24}


def decode_batch(core: EngineCore, count: int) -> DecodeBatch:
    """The first decode step of `count` requests, built and not run."""
    core.add([request(f"d{i}", prompt(50 + 9 * i, i), 20) for i in range(count)])
    parts = core._parts
    while True:
        schedule = parts.scheduler.schedule()
        if all(item.num_computed for item in schedule.items):
            batch = parts.builder.build(schedule)
            assert isinstance(batch, DecodeBatch)
            return batch
        batch = parts.builder.build(schedule)
        logits = parts.runner.run(batch).logits
        sampled = parts.sampler.sample(logits, batch.samples)
        names = [row.request.request_id for row in batch.samples]
        pairs = zip(names, sampled.token_ids, strict=True)
        parts.scheduler.commit(schedule, {name: [token] for name, token in pairs})


@pytest.mark.parametrize("num_live", [0, 1, 5, 8])
@pytest.mark.parametrize("has_static", [True, False])
def test_padding_of_a_bucket_changes_nothing(num_live, has_static):
    core = core_on("cuda", has_static=has_static)
    batch = decode_batch(core, 8)
    runner = core._parts.runner
    eager = runner.run(batch.eager()).logits
    logits, flags = runner._graphs.replay(first_rows(batch, num_live))
    torch.testing.assert_close(logits, eager[:num_live], rtol=1e-4, atol=1e-4)
    assert not bool(flags.any())


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Call it: from then on, up to the end of the test, waiting for the device raises."""

    def begin() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("has_static", [True, False])
def test_a_decode_step_waits_for_nothing(has_static, no_waiting):
    core = core_on("cuda", has_static=has_static)
    batch = decode_batch(core, 8)
    parts = core._parts
    parts.sampler.launch(parts.runner.run(batch).logits, batch.samples)  # what is lazy
    no_waiting()
    output = parts.runner.run(batch)
    parts.sampler.launch(output.logits, batch.samples)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefill_step_waits_for_nothing(dtype, no_waiting):
    core = core_on("cuda", dtype=dtype)
    parts = core._parts
    core.add([request(f"p{i}", prompt(n, i), 5) for i, n in enumerate((130, 40, 7))])
    batch = parts.builder.build(parts.scheduler.schedule())
    parts.sampler.launch(parts.runner.run(batch).logits, batch.samples)
    no_waiting()
    output = parts.runner.run(batch)
    parts.sampler.launch(output.logits, batch.samples)


@pytest.mark.parametrize("model", [V32, GLM])
def test_overlapped_steps_give_the_same_tokens(model):
    requests = [*twenty(), request("warm", prompt(70, 20), 12, temperature=0.9, top_p=0.8, seed=5)]
    requests.append(request("scored", prompt(33, 21), 9, logprobs=2))
    overlapped, plain = (core_on("cuda", model=model, overlap=mode) for mode in ("on", "off"))
    assert outputs(overlapped, requests) == outputs(plain, requests)


def device_allocations() -> tuple[int, int]:
    """How often torch has asked the device for memory, and given cached memory back to do so."""
    found = torch.cuda.memory_stats()
    return found["num_device_alloc"], found["num_alloc_retries"]


def test_memory_does_not_grow_after_the_warm_up():
    core = core_on("cuda", dtype="bfloat16", max_num_batched_tokens=512)
    warm_up(core._parts, lambda *_: None)
    torch.cuda.synchronize()
    reserved, calls = torch.cuda.memory_reserved(), device_allocations()
    outputs(core, twenty(3))  # what the sampler and the host's side keep
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for salt in range(3):
        again = [request(f"s{salt}-{i}", prompt(n, 7 + salt), 30) for i, n in enumerate(LENGTHS)]
        outputs(core, again)
    assert torch.cuda.memory_reserved() == reserved
    assert abs(torch.cuda.memory_allocated() - held) < 1 << 20
    assert device_allocations() == calls


@pytest.mark.parametrize("max_num_batched_tokens", [512, 4096])
def test_steps_and_graphs_take_no_more_than_was_planned(max_num_batched_tokens):
    flags = {
        "model": "random:deepseek_v32,layers=2,hidden=1024,heads=32,topk=512,max_len=32768,"
        "kv_rank=512,rope_dim=64,nope_dim=128,v_dim=128,index_heads=32,index_dim=128,vocab=32768",
        "dtype": "bfloat16",
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": 64,
        "num_kv_pages": 1024,
    }
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    eager = core_on("cuda", enforce_eager=True, **flags)
    parts = eager._parts
    rows = min(DEFAULT_ROWS, max_num_batched_tokens)
    sizes = StepSizes(max_num_batched_tokens, 64, 32768, graph_tokens=rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    warm_up(parts, lambda *_: None)
    step = torch.cuda.max_memory_allocated() - held
    model = parts.runner.model.config
    planned = step_bytes(model, torch.bfloat16, sizes, 1)
    assert step <= planned, f"{step >> 20} MiB of {planned >> 20} planned"
    weights_and_cache = held - before
    del eager, parts
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    captured = core_on("cuda", **flags)
    torch.cuda.empty_cache()
    graphs = torch.cuda.memory_reserved() - before - weights_and_cache
    planned = graph_bytes(captured._parts.runner.model.config, torch.bfloat16, sizes, 1)
    assert graphs <= planned + (64 << 20), f"{graphs >> 20} MiB of {planned >> 20} planned"


def test_a_poisoned_request_fails_alone():
    core = core_on("cuda", overlap="off")
    core.add([request(name, prompt(20, i), 6) for i, name in enumerate(("good", "bad", "fine"))])
    core.step()
    (victim,) = [s for s in core._parts.scheduler._running if s.request_id == "bad"]
    core._parts.cache.poison("tokens", [int(victim.table.views[0][0])])
    found: dict[str, list] = {}
    while core.has_work:
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)
    assert found["bad"][-1].finish_reason == "error"
    assert len(tokens(found["good"])) == len(tokens(found["fine"])) == 5


def test_recorder_shares_one_pool():
    """Two buckets' outputs may lie in the same memory; each holds until the next replay."""
    recorder = CudaRecorder()
    source = torch.ones(4, device="cuda")
    first, one = recorder.record(lambda: (source * 2, source > 0))
    second, two = recorder.record(lambda: (source * 3, source > 0))
    source.fill_(5)
    first()
    assert one[0].tolist() == [10.0] * 4
    second()
    assert two[0].tolist() == [15.0] * 4
