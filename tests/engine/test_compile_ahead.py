"""Compiling ahead: launches compile and run nothing, fresh memory is zeros, all is as it was after.

Triton's launches are played by functions that note how they were called: here is no GPU.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from gnomon.attention.dry_run import DryRun
from gnomon.engine.compile_ahead import compile_ahead, compiling_ahead

CUDA = torch.device("cuda")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(arguments, warmup) of every launch, which builds under the key of its first argument."""
    noted: list[tuple[Any, ...]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool) -> Any:
        noted.append((args, warmup))
        found = self.device_caches[0][0].get(args[0])
        return found or JITFunction._do_compile(self, args[0], {}, 0)

    def build(self: Any, key: Any, signature: Any, device: Any) -> str:
        noted.append((key, "built"))
        return f"future of {key}"

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(JITFunction, "_do_compile", build)
    return noted


def launch(kernel: Any, key: str) -> Any:
    return JITFunction.run(kernel, key, grid=(1,), warmup=False)


def test_launches_only_compile_and_each_kind_once(launches: list[tuple[Any, ...]]) -> None:
    kernel = SimpleNamespace(device_caches={0: ({},)})
    with compiling_ahead(CUDA):
        for key in ("a", "b", "a"):
            assert launch(kernel, key) == f"future of {key}"
    assert launches == [
        (("a",), True), ("a", "built"), (("b",), True), ("b", "built"), (("a",), True),
    ]  # fmt: skip
    launch(kernel, "a")
    assert launches[-1] == (("a",), False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4096),
        lambda: torch.empty(64, 64, dtype=torch.int32),
        lambda: torch.ones(3).new_empty(4096),
        lambda: torch.empty_like(torch.ones(4096)),
        lambda: torch.empty_strided((4, 5), (1, 4), dtype=torch.int64),
    ],
)
def test_fresh_memory_is_zeros(make: Any) -> None:
    with torch.inference_mode():
        for _ in range(20):  # memory that was something else before
            torch.full((4096,), 7.0)
            with DryRun():
                assert not bool(make().any())


def test_what_fails_ahead_is_told_and_forgotten(
    launches: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    before = JITFunction.run

    def fail() -> None:
        raise ValueError("no such shape")

    with caplog.at_level(logging.WARNING):
        compile_ahead(CUDA, [fail])
    assert "one by one: ValueError: no such shape" in caplog.text
    assert JITFunction.run is before


def test_a_cpu_has_nothing_to_compile() -> None:
    called: list[int] = []
    compile_ahead(torch.device("cpu"), [lambda: called.append(1)])
    assert called == []
    with compiling_ahead(torch.device("cpu")):
        assert JITFunction.run.__module__ == "triton.runtime.jit"
