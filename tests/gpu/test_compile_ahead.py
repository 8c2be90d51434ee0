"""On a GPU: launches within the context compile and run nothing; an engine starts the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from gnomon.attention.dry_run import DryRun
from gnomon.engine.compile_ahead import await_builders, compiling_ahead, start_builders
from tests.gpu.external_truth import kernel
from tests.gpu.test_engine import V32, core_on, twenty

pytestmark = pytest.mark.gpu


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + place, tl.load(x + place, place < n) + 1, place < n)


def test_a_launch_compiles_and_does_nothing() -> None:
    x = torch.zeros(200, device="cuda")
    with compiling_ahead(x.device):
        for block in (64, 128, 64):
            add_one[(4,)](x, 200, BLOCK=block)
        assert not bool(torch.empty(1 << 20, device="cuda").any())
    assert not bool(x.any())
    kernels = add_one.device_caches[torch.cuda.current_device()][0]
    assert len(kernels) == 2
    assert not any(hasattr(kernel, "future") for kernel in kernels.values())
    assert all(kernel.module is not None for kernel in kernels.values())  # on the device already
    add_one[(4,)](x, 200, BLOCK=64)
    assert bool((x == 1).all())


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16", "kv_layout": "fp8"}], ids=str)
def test_an_engine_that_was_compiled_ahead_answers_as_one_that_was_not(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.tiny_engine import outputs

    ahead = outputs(core_on("cuda", model=V32, **flags), twenty())
    for module in ("graphs", "prefill_graphs"):
        monkeypatch.setattr(f"gnomon.engine.{module}.compile_ahead", lambda *_: None)
    assert outputs(core_on("cuda", model=V32, **flags), twenty()) == ahead


def test_what_deepgemm_would_compile_is_built_by_processes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    run = kernel("deepgemm", "linear_fp8", 16)
    x, weight = torch.zeros(2048, 512, device="cuda"), torch.zeros(1024, 512, device="cuda")
    codes = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    scales = torch.ones(2048, 4, device="cuda"), torch.ones(8, 4, device="cuda")
    with DryRun() as dry:
        found = run(codes[0], scales[0], codes[1], scales[1], torch.bfloat16)
    assert found.shape == (2048, 1024)
    assert [note.job["function"] for note in dry.notes] == ["fp8_gemm_nt"]
    builders = start_builders(dry.notes)
    await_builders(builders, 80.0)
    assert [builder.returncode for builder in builders] == [0]
    assert any(tmp_path.glob("cache/kernel.*"))
    with DryRun() as again:
        run(codes[0], scales[0], codes[1], scales[1], torch.bfloat16)
    assert again.notes == []
