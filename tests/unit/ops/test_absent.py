"""Providers that cannot run here, and what the log says where that surprises."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.attention import providers
from gnomon.attention.dispatch import OpNeed, bind_operators, choose
from gnomon.attention.providers import absent_providers, builtin_providers, c_compiler
from gnomon.attention.providers.external.flashmla import REQUIREMENTS
from gnomon.attention.providers.external.provider import ExternalProvider
from gnomon.errors import UnsupportedError
from tests.unit.external.test_places import HOPPER


@pytest.fixture(autouse=True)
def as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def has_gpu(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(providers.cuda, "is_available", lambda: answer)


def test_a_provider_that_cannot_run_here_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_gpu(monkeypatch, False)
    (triton,) = absent_providers()
    assert triton.name not in {provider.name for provider in builtin_providers()}
    choice = choose("topk", OpNeed(), (*builtin_providers(), triton))
    assert choice.provider.name == "torch"
    assert "needs a CUDA GPU, and torch finds none" in dict(choice.rejected)["triton"]
    with pytest.raises(UnsupportedError, match=r"'triton' was forced .*needs a CUDA GPU"):
        bind_operators(OpNeed(), (*builtin_providers(), triton), "triton")
    with pytest.raises(UnsupportedError, match="'triton' needs a CUDA GPU"):
        triton.kernel("topk")
    assert triton.fusion("topk_slots", OpNeed()) is None
    assert not triton.supports("topq", OpNeed()).has_kernel
    assert caplog.text == "", "nobody expects it on a CPU"


def test_what_triton_compiles_launchers_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert c_compiler() is None
    for name in ("cc", "clang", "gcc"):
        (tmp_path / name).touch(mode=0o755)
        assert c_compiler() == (None if name == "cc" else str(tmp_path / name))
    monkeypatch.setenv("CC", "cc")
    assert c_compiler() == str(tmp_path / "cc")
    monkeypatch.setenv("CC", "icc")
    assert c_compiler() is None, "Triton tries no other"


def test_without_a_c_compiler_triton_and_what_needs_it_are_not_offered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would die at their first launch, after the weights."""
    has_gpu(monkeypatch, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert {provider.name for provider in builtin_providers()} == {"torch", "reference"}
    assert "triton is not used: needs a C compiler (what CC names, gcc or clang)" in caplog.text
    (triton,) = absent_providers()
    assert "C compiler" in triton.supports("topk", OpNeed("cuda")).reason
    library = ExternalProvider("library", 1, REQUIREMENTS, lambda: {"sparse_mla": print})
    assert "C compiler" in library.supports("sparse_mla", HOPPER).reason
    (tmp_path / "gcc").touch(mode=0o755)
    again = ExternalProvider("library", 1, REQUIREMENTS, lambda: {"sparse_mla": print})
    assert again.supports("sparse_mla", HOPPER).is_ok
