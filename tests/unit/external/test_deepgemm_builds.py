"""DeepGEMM calls noted in a dry run, and made again by the program on zeros of the same shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.attention.dry_run import DryRun, dry_run_here
from gnomon.attention.providers.external.deepgemm_builds import (
    MOST_KEYS,
    MOST_ROWS,
    Noting,
    build,
    spec_of,
    value_of,
)
from gnomon.engine.compile_ahead import await_builders, start_builders

FP8 = torch.float8_e4m3fn
LIBRARY = """
import pathlib, torch
HERE = pathlib.Path(__file__).parent

def fp8_gemm_nt(a, b, d, *, disable_ue8m0_cast):
    if b[0].shape[0] == 13:
        raise RuntimeError("no such kernel")
    d.fill_(1)
    (HERE / "-".join(map(str, [*a[0].shape, *b[0].shape, a[1].stride(1)]))).touch()

def fp8_mqa_logits(q, kv, weights, first, stop, *, clean_logits):
    (HERE / f"mqa-{q.shape[0]}-{kv[0].shape[0]}-{clean_logits}").touch()
    return torch.ones(q.shape[0], kv[0].shape[0])
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "kernels"))
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    import deep_gemm

    yield deep_gemm
    sys.modules.pop("deep_gemm", None)


def product(rows: int, columns: int, depth: int) -> tuple[Any, ...]:
    codes, weight = (torch.zeros(n, depth).to(FP8) for n in (rows, columns))
    scales = torch.ones(depth // 128, rows).T  # columns adjoin, as the library likes it
    return (codes, scales), (weight, torch.ones(1, depth // 128)), torch.zeros(rows, columns)


def score(rows: int, keys: int) -> tuple[Any, ...]:
    count = torch.zeros(rows, dtype=torch.int32)
    keys_and_scales = torch.zeros(keys, 8).to(FP8), torch.ones(keys)
    return torch.zeros(rows, 2, 8).to(FP8), keys_and_scales, torch.ones(rows, 2), count, count


def made(library: Any) -> set[str]:
    return (
        {path.name for path in Path(library.__file__).parent.iterdir()}
        - {"__init__.py"}
        - {"__pycache__"}
    )


def test_outside_a_dry_run_calls_go_through(library: Any) -> None:
    args = product(4, 5, 256)
    assert dry_run_here() is None
    Noting(library).fp8_gemm_nt(*args, disable_ue8m0_cast=True)
    assert made(library) == {"4-256-5-256-4"}
    assert bool((args[2] == 1).all())
    assert Noting(library).fp8_mqa_logits(*score(3, 7), clean_logits=False).shape == (3, 7)


def test_within_one_they_are_noted_and_give_zeros(library: Any) -> None:
    noting, args = Noting(library), product(4, 5, 256)
    with DryRun() as dry:
        assert dry_run_here() is dry
        noting.fp8_gemm_nt(*args, disable_ue8m0_cast=True)
        scores = noting.fp8_mqa_logits(*score(1000, 5000), clean_logits=False)
    assert made(library) == set()
    assert scores.shape == (1000, 5000)
    assert not bool(scores.any())
    assert [note.job["function"] for note in dry.notes] == ["fp8_gemm_nt", "fp8_mqa_logits"]
    assert build([json.loads(json.dumps(dict(note.job))) for note in dry.notes], "cpu") == 0
    assert made(library) == {"4-256-5-256-4", f"mqa-{MOST_ROWS}-{MOST_KEYS}-False"}


def test_a_call_that_fails_is_counted(library: Any) -> None:
    with DryRun() as dry:
        for columns in (13, 5):
            Noting(library).fp8_gemm_nt(*product(4, columns, 128), disable_ue8m0_cast=True)
    assert build([dict(note.job) for note in dry.notes], "cpu") == 1
    assert made(library) == {"4-128-5-128-4"}


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12).view(3, 4).T,
        torch.zeros(5, 8, dtype=torch.bfloat16)[:, 2:5],
        torch.zeros(3, 4).to(FP8),
        torch.zeros(0, 4, dtype=torch.int32),
    ],
    ids=lambda value: str(value.dtype),
)
def test_shapes_and_strides_survive(value: torch.Tensor) -> None:
    again = value_of(json.loads(json.dumps(spec_of(value))), "cpu")
    assert (again.shape, again.dtype) == (value.shape, value.dtype)
    assert again.stride() == value.stride()


def test_processes_build_every_job_once_and_say_what_failed(
    library: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DryRun() as dry:
        for columns in (13, 5, 5, 13):
            Noting(library).fp8_gemm_nt(*product(4, columns, 128), disable_ue8m0_cast=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    builders = start_builders(dry.notes)
    assert 1 <= len(builders) <= 2
    await_builders(builders, 60.0)  # here is no GPU, and that is what they say
    assert "built at their first use" in caplog.text
    assert all(builder.returncode for builder in builders)
    assert start_builders([]) == []
