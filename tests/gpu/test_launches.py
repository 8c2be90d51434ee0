"""How many kernels a MoE layer of a decode step launches: at most 30 at h128.

Counted, not estimated: torch's profiler over a replay of a captured step of a model with real
widths; the layer is what runs between the second cache write and the third.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from gnomon.bench.step import StepCell, StepResult, bench_steps
from gnomon.bench.step_inputs import fill_cache
from gnomon.engine.assembly import assemble
from gnomon.engine.config import EngineConfig

pytestmark = pytest.mark.gpu
MOST = 30  # issue 5; vLLM launches 45
FEWEST = 15  # a layer has a dozen products and their neighbours: fewer were counted wrongly
CELL = StepCell("decode", 64, 4096)


def decode_step(**flags: Any) -> StepResult:
    """A decode step of 64 rows through a dense layer and two MoE layers, profiled."""
    config = EngineConfig.of(
        model="random:h128,layers=3,experts=16,vocab=2048",
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_kv_pages=64 * CELL.length // 64 + 8,
        max_captured_prefill_tokens=0,
        gpu_memory_utilization=1.0,  # other tests hold some of the device
        **flags,
    )
    parts = assemble(config, lambda *_: None)
    fill_cache(parts.cache, 0)
    (result,) = bench_steps(parts, [CELL], 2048, with_profile=True)
    return result


@pytest.mark.parametrize("kv_layout", ["fp8", "auto"])
@pytest.mark.parametrize("provider", ["triton", "auto"])
def test_a_moe_layer_launches_few_kernels(provider: str, kv_layout: str) -> None:
    flags = {"kv_layout": kv_layout, "attention_provider": provider}
    if provider == "auto":  # with what libraries there are
        flags["provider_path"] = os.environ.get("GNOMON_PROVIDER_PATH")
    result = decode_step(**flags)
    assert result.layer is not None, result.reason
    assert result.layer.num_layers == 1
    total = sum(result.layer.counts.values())
    names = "\n".join(f"{kernel.count} {kernel.name[:80]}" for kernel in result.kernels)
    assert FEWEST <= total <= MOST, f"{total} launches a layer; of the step:\n{names}"
