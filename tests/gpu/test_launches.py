"""How many kernels a MoE layer of a decode step launches: at most 30 at h128 over FP8.

Counted, not estimated: torch's profiler over replays of captured steps of two models, one a MoE
layer longer than the other; the difference is one layer. Real widths, random weights.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from gnomon.bench.step import StepCell, bench_steps
from gnomon.bench.step_inputs import fill_cache
from gnomon.engine.assembly import assemble
from gnomon.engine.config import EngineConfig

pytestmark = pytest.mark.gpu
MOST = 30  # issue 5; vLLM launches 45
CELL = StepCell("decode", 64, 4096)


def launches(num_layers: int, **flags: Any) -> Counter[str]:
    """Kernels of one decode step of 64 rows, by name."""
    config = EngineConfig.of(
        model=f"random:h128,layers={num_layers},experts=16,vocab=2048",
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_kv_pages=64 * CELL.length // 64 + 8,
        **flags,
    )
    parts = assemble(config, lambda *_: None)
    fill_cache(parts.cache, 0)
    (result,) = bench_steps(parts, [CELL], 2048, with_profile=True)
    assert result.num_launches, result.reason
    return Counter({kernel.name: kernel.count for kernel in result.kernels})


def one_layer(**flags: Any) -> Counter[str]:
    """Kernels of one MoE layer."""
    longer, shorter = launches(3, **flags), launches(2, **flags)
    longer.subtract(shorter)
    assert min(longer.values()) >= 0, longer
    return longer


def shown(layer: Counter[str]) -> str:
    lines = (f"{count} {name[:80]}" for name, count in sorted(layer.items()) if count)
    return f"{layer.total()} launches:\n" + "\n".join(lines)


@pytest.mark.parametrize("kv_layout", ["fp8", "auto"])
def test_a_moe_layer_of_triton_alone(kv_layout: str) -> None:
    layer = one_layer(kv_layout=kv_layout, attention_provider="triton")
    assert layer.total() <= MOST, shown(layer)


@pytest.mark.parametrize("kv_layout", ["fp8", "auto"])
def test_a_moe_layer_with_what_libraries_there_are(kv_layout: str) -> None:
    layer = one_layer(kv_layout=kv_layout, provider_path=os.environ.get("GNOMON_PROVIDER_PATH"))
    assert layer.total() <= MOST, shown(layer)


def test_the_counter_counts() -> None:
    """A layer has a dozen matrix products and more; none of it comes from the host."""
    layer = one_layer(kv_layout="fp8", attention_provider="triton")
    assert layer.total() > 15
    assert not [name for name, count in layer.items() if count and "HtoD" in name]
