"""Prefill captured between its attentions, on a GPU: graph = eager, no waiting, no growth.

Tiny random models of both families in fp32 and bf16, FP8 weights and caches; two layers at
published widths. The oracle is the same engine's eager step. A minute with a cold kernel cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gnomon.engine.assembly import put_together, survey
from gnomon.engine.batch import Batch
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.engine.warm_up import warm_up
from gnomon.models.sources import open_model
from tests.engine.test_prefill_graphs import batch_of
from tests.engine.tiny_engine import VOCAB, outputs, prompt, request
from tests.gpu.test_engine import device_allocations

pytestmark = pytest.mark.gpu

V32, GLM = "random:deepseek_v32,layers=3", "random:glm_moe_dsa,layers=4,topk=32"
WIDE = (
    "random:deepseek_v32,layers=2,hidden=1024,heads=32,topk=512,max_len=32768,kv_rank=512,"
    "rope_dim=64,nope_dim=128,v_dim=128,index_heads=32,index_dim=128,vocab=4096"
)
LENGTHS = (3, 40, 64, 65, 90, 130, 17, 5, 71, 100, 33, 2, 80, 61, 200, 63, 128, 31, 32, 250)


def core_on_gpu(captured: int, **flags: Any) -> EngineCore:
    """A tiny engine that captures prefill steps of up to so many rows."""
    defaults = {
        "model": V32,
        "dtype": "float32",
        "num_kv_pages": 512,
        "max_num_seqs": 24,
        "device": "cuda",
        "max_num_batched_tokens": 256,
        "max_captured_prefill_tokens": captured,
        "gpu_memory_utilization": 1.0,  # other tests hold some of the device
    }
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
    return EngineCore(put_together(found, loaded))


def twenty(num_new: int = 12) -> list:
    return [request(f"r{i}", prompt(n, i), num_new) for i, n in enumerate(LENGTHS)]


def first_step(core: EngineCore, lengths: tuple[int, ...]) -> Batch:
    """The step that prefills prompts of these lengths, built and not run."""
    core.add([request(f"p{i}", prompt(n, i), 5) for i, n in enumerate(lengths)])
    batch = core._parts.builder.build(core._parts.scheduler.schedule())
    assert isinstance(batch, Batch)
    return batch


@pytest.mark.parametrize("model", [V32, GLM])
@pytest.mark.parametrize("layout", ["auto", "fp8"])
def test_tokens_are_those_of_eager_steps(model, layout):
    captured = core_on_gpu(256, model=model, kv_layout=layout)
    eager = core_on_gpu(0, model=model, kv_layout=layout)
    assert outputs(captured, twenty()) == outputs(eager, twenty())


@pytest.mark.parametrize("model", [V32, GLM, f"{V32},fp8=true", f"{GLM},fp8=true"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [[], [1], [100, 28], [9, 40, 20]])
def test_a_step_in_any_bucket_is_the_eager_step(model, dtype, lengths):
    """None, one, some and all of 128 rows live; twice, with a full step of others in between."""
    core = core_on_gpu(128, model=model, dtype=dtype)
    runner = core._parts.runner
    batch, full = batch_of(core._parts, lengths), batch_of(core._parts, [128])
    ops = runner.operators(batch.plan)
    eager = runner.run(batch, ops=ops)
    graphs = runner._prefill
    bound = 1e-4 if dtype == "float32" and "fp8" not in model else 0.1
    for _ in range(2):
        output = graphs.forward(batch, ops, 128)
        logits = runner.logits(output.hidden.data.index_select(0, batch.logit_rows))
        torch.testing.assert_close(logits, eager.logits, rtol=bound, atol=bound)
        assert not bool(output.nan_rows.data.any())
        assert bool(graphs.buffers.stream(128).isfinite().all())
        graphs.forward(full, ops, 128)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_widths(dtype):
    core = core_on_gpu(
        1024, model=WIDE, dtype=dtype, max_num_batched_tokens=1024, num_kv_pages=1024
    )
    runner = core._parts.runner
    batch = first_step(core, (700, 40, 200))
    assert runner.captures(batch)
    eager = runner.run(batch, ops=runner.operators(batch.plan)).logits
    bound = 1e-3 if dtype == "float32" else 0.1
    torch.testing.assert_close(runner.run(batch).logits, eager, rtol=bound, atol=bound)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Call it: from then on, up to the end of the test, waiting for the device raises."""

    def begin() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_step_waits_for_nothing(dtype, no_waiting):
    core = core_on_gpu(256, dtype=dtype)
    parts = core._parts
    batch = first_step(core, (130, 40, 7))
    assert parts.runner.captures(batch)
    parts.sampler.launch(parts.runner.run(batch).logits, batch.samples)
    no_waiting()
    output = parts.runner.run(batch)
    parts.sampler.launch(output.logits, batch.samples)


@pytest.mark.parametrize("model", [V32, GLM])
def test_overlapped_steps_give_the_same_tokens(model):
    overlapped, plain = (core_on_gpu(256, model=model, overlap=mode) for mode in ("on", "off"))
    assert outputs(overlapped, twenty()) == outputs(plain, twenty())


def test_memory_does_not_grow_after_the_warm_up():
    core = core_on_gpu(256, dtype="bfloat16")
    warm_up(core._parts, lambda *_: None)
    torch.cuda.synchronize()
    reserved, calls = torch.cuda.memory_reserved(), device_allocations()
    outputs(core, twenty(3))  # what the sampler and the host's side keep
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for salt in range(3):
        outputs(core, [request(f"{salt}-{i}", prompt(n, salt), 9) for i, n in enumerate(LENGTHS)])
    assert torch.cuda.memory_reserved() == reserved
    assert abs(torch.cuda.memory_allocated() - held) < 1 << 20
    assert device_allocations() == calls


def test_sizes_take_turns_while_memory_is_reused():
    core = core_on_gpu(256, dtype="bfloat16")
    parts = core._parts
    core.add([request(f"p{i}", prompt(n, i), 5) for i, n in enumerate((13, 110, 250))])
    batches = []
    for _ in range(2):  # all of the first two prompts and a part of the third; the rest of it
        schedule = parts.scheduler.schedule()
        batch = parts.builder.build(schedule)
        eager = parts.runner.run(batch, ops=parts.runner.operators(batch.plan))
        sampled = parts.sampler.sample(eager.logits, batch.samples)
        names = [row.request.request_id for row in batch.samples]
        pairs = zip(names, sampled.token_ids, strict=True)
        parts.scheduler.commit(schedule, {name: [token] for name, token in pairs})
        batches.append(batch)
    assert all(parts.runner.captures(batch) for batch in batches)
    expected = [parts.runner.run(b, ops=parts.runner.operators(b.plan)).logits for b in batches]
    for turn in (0, 1, 0, 1, 1, 0):
        torch.cuda.empty_cache()
        churn = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 10, 1 << 20)]
        found = parts.runner.run(batches[turn]).logits
        torch.testing.assert_close(found, expected[turn], rtol=0.1, atol=0.1)
        del churn
