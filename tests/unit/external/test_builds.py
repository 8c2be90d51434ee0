"""Builds of libraries that lack what is called of them, and what the log says of libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gnomon.attention.providers.external import external_providers
from gnomon.attention.providers.external.deepgemm import DeepGemm
from gnomon.attention.providers.external.deepgemm_library import FUNCTIONS, usable
from gnomon.attention.providers.external.provider import UNVERIFIED_RANK
from tests.unit.external.test_places import HOPPER


def package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)


@pytest.mark.parametrize(
    ("name", "library", "op", "lacking"),
    [
        ("flashmla", "flash_mla", "sparse_mla", "flash_mla_with_kvcache"),
        ("fa3", "flash_attn_interface", "dense_mha", "flash_attn_with_kvcache"),
        ("flashinfer", "flashinfer", "sparse_mla", "BatchMLAPagedAttentionWrapper"),
        ("deepgemm", "deep_gemm", "linear_fp8", "fp8_gemm_nt"),
    ],
)
def test_an_old_build_is_refused_and_told_before_it_is_called(
    name: str,
    library: str,
    op: str,
    lacking: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    package(tmp_path, library, "__version__ = '0.1'")
    monkeypatch.delitem(sys.modules, library, raising=False)
    provider = {p.name: p for p in external_providers(str(tmp_path))}[name]
    verdict = provider.supports(op, HOPPER)
    sys.modules.pop(library, None)
    assert not verdict.is_ok
    assert f"{library} 0.1" in verdict.reason
    assert lacking in verdict.reason
    assert f"{name} is not used: " in caplog.text
    assert verdict.reason in caplog.text


def test_of_a_build_that_lacks_something_the_rest_is_used() -> None:
    module = SimpleNamespace(fp8_gemm_nt=print, fp8_mqa_logits=print)
    every = DeepGemm(module, 132).kernels()  # type: ignore[arg-type]
    assert set(usable(every, module)) == {"index_scores", "lazy_scores", "linear_fp8"}
    assert set(every) == set(FUNCTIONS)


def test_what_is_not_installed_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    provider = {p.name: p for p in external_providers()}["flashmla"]
    assert "not installed" in provider.supports("sparse_mla", HOPPER).reason
    assert caplog.text == ""


def test_flashinfer_is_marked_unverified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class_of = "mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=print)"
    package(tmp_path, "flashinfer", f"import types; {class_of}")
    provider = {p.name: p for p in external_providers(str(tmp_path))}["flashinfer"]
    assert provider.supports("sparse_mla", HOPPER).is_ok
    sys.modules.pop("flashinfer", None)
    assert "flashinfer is unverified" in caplog.text
    assert provider.rank == UNVERIFIED_RANK
