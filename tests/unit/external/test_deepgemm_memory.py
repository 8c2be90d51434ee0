"""What was built is not built again: remembered in the library's own cache, and nothing else."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnomon.attention.dry_run import DryRun
from gnomon.attention.providers.external.deepgemm_builds import Noting, build, text_of
from gnomon.attention.providers.external.deepgemm_memory import BuiltJobs, cache_folder
from gnomon.engine.compile_ahead import start_builders

CPU = torch.device("cpu")
LIBRARY = """
def fp8_gemm_nt(a, b, d, *, disable_ue8m0_cast):
    if b[0].shape[0] == 13:
        raise RuntimeError("no such kernel")
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache_of_it"))
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("12.9")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return tmp_path / "cache_of_it"


@pytest.fixture
def library(tmp_path: Path) -> Any:
    package = tmp_path / "place" / "deep_gemm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    (package / "_C.cpython-311.so").write_bytes(b"code")
    yield SimpleNamespace(__file__=str(package / "__init__.py"), fp8_gemm_nt=None)
    sys.modules.pop("deep_gemm", None)


def noted(library: Any, *columns: int) -> list[Any]:
    """Notes of one dry run that multiplies by matrices of so many columns, each twice."""
    noting = Noting(library)
    with DryRun() as dry:
        for number in columns * 2:
            codes, weight = torch.zeros(4, 128), torch.zeros(number, 128)
            scales = torch.ones(4, 1), torch.ones(1, 1)
            out = torch.zeros(4, number)
            noting.fp8_gemm_nt(
                (codes, scales[0]), (weight, scales[1]), out, disable_ue8m0_cast=True
            )
    return dry.notes


def jobs_of(notes: list[Any]) -> list[dict[str, Any]]:
    return [dict(note.job) for note in notes]


def test_a_start_builds_only_what_no_start_before_has_built(library: Any) -> None:
    first = noted(library, 5, 7)
    assert len(first) == 2
    assert build(jobs_of(first), "cpu") == 0
    assert noted(library, 5, 7) == []
    assert start_builders(noted(library, 5, 7)) == []
    assert [note.job["args"][1][0]["shape"] for note in noted(library, 7, 9)] == [[9, 128]]


def test_a_build_that_failed_is_tried_again(library: Any) -> None:
    assert build(jobs_of(noted(library, 13, 5)), "cpu") == 1
    assert [note.job["args"][1][0]["shape"][0] for note in noted(library, 13, 5)] == [13]


def test_whoever_wipes_the_cache_wipes_the_memory(library: Any, cache: Path) -> None:
    build(jobs_of(noted(library, 5)), "cpu")
    assert any(cache.rglob("*.json"))
    assert [path.name for path in cache.parent.iterdir() if any(path.rglob("*.json"))] == [
        cache.name
    ]
    shutil.rmtree(cache / "cache")  # where the library keeps its kernels
    assert len(noted(library, 5)) == 1


def change_library(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(library.__file__).parent / "_C.cpython-311.so").write_bytes(b"other code")


def touch_library(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(Path(library.__file__).parent / "_C.cpython-311.so", (1, 1))


def change_nvcc(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc").write_text("13.0.1")


def change_setting(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_CPP_STANDARD", "17")


def change_compiler(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", "/opt/nvcc")


def change_device(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="other", major=9, minor=0, multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(
        "gnomon.attention.providers.external.deepgemm_builds._device_of",
        lambda args: torch.device("cuda"),
    )


@pytest.mark.parametrize(
    "change",
    [
        change_library,
        touch_library,
        change_nvcc,
        change_setting,
        change_compiler,
        change_device,
    ],
)
def test_what_kernels_hang_on_makes_another_memory(
    library: Any, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(jobs_of(noted(library, 5)), "cpu")
    assert noted(library, 5) == []
    change(library, monkeypatch)
    assert len(noted(library, 5)) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", None])
def test_a_damaged_file_counts_as_none(library: Any, cache: Path, damage: bytes | None) -> None:
    build(jobs_of(noted(library, 5)), "cpu")
    (path,) = cache.rglob("*.json")
    said = path.read_bytes()
    path.write_bytes(said[:-5] if damage is None else damage)
    assert len(noted(library, 5)) == 1
    build(jobs_of(noted(library, 5)), "cpu")
    assert path.read_bytes() == said
    assert noted(library, 5) == []


def test_a_file_of_another_job_counts_as_none(library: Any, cache: Path) -> None:
    memory = BuiltJobs.of(library, CPU)
    memory.remember("one")
    (path,) = cache.rglob("*.json")
    other = path.read_bytes()
    memory.remember("two")
    for path in cache.rglob("*.json"):
        path.write_bytes(other)
    assert memory.holds("one")
    assert not memory.holds("two")


def test_many_may_remember_at_once(library: Any, cache: Path) -> None:
    memory = BuiltJobs.of(library, CPU)
    texts = [text_of({"function": str(number % 7)}) for number in range(210)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(memory.remember, texts))
    assert all(memory.holds(text) for text in texts)
    files = [path for path in (cache / "cache" / "gnomon").iterdir()]
    assert len(files) == 7


def test_a_cache_that_cannot_be_written_is_no_error(
    library: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the folder would be")
    memory = BuiltJobs.of(library, CPU)
    memory.remember("one")
    assert not memory.holds("one")


def test_the_folder_is_the_library_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder().name == "cache_of_it"
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "")
    assert cache_folder() == Path("/home/somebody/.deep_gemm")
