"""The memory law of loading, on a small checkpoint: bench/load_memory.py measures a large one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "load_memory.py"
NUM_BYTES = 96 << 20
SLACK_BYTES = 40_000_000  # 100 MB in the law; less here, so that a second copy cannot hide in it

MAPPED = """
from safetensors.torch import load_file
params = {}
for path in sorted(Path(folder).glob("*.safetensors")):
    params |= {key: value + 0 for key, value in load_file(path).items()}
"""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_load_memory", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("fp8", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_peak_is_the_weights_and_a_small_buffer(
    bench: ModuleType, fp8: bool, dtype: str, tmp_path: Path
) -> None:
    bench.write_checkpoint(tmp_path, NUM_BYTES, fp8=fp8)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    result = bench.measure(tmp_path, dtype)
    assert result.loaded >= 0.9 * NUM_BYTES
    assert result.on_top >= 0.9 * result.loaded  # else the meter sees nothing
    assert result.on_top <= bench.FACTOR * result.loaded + SLACK_BYTES


def test_the_meter_sees_mapped_pages(bench: ModuleType, tmp_path: Path) -> None:
    """A loader that maps the files and copies out of them breaks the law."""
    bench.write_checkpoint(tmp_path, NUM_BYTES, fp8=False, shards=1)
    result = bench.measure(tmp_path, "bfloat16", load=MAPPED)
    assert result.on_top > bench.FACTOR * result.loaded + SLACK_BYTES
