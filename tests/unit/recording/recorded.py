"""Recordings for the tests: steps of a tiny engine, and providers with one planted mistake.

In:  flags, prompts. Out: files that the engine itself wrote; KernelSets that are the torch provider
but for one operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.ops.values import TopK
from gnomon.attention.providers.torch import PROVIDER as TORCH
from gnomon.attention.recording import RecordedCall, Recording
from gnomon.attention.recording_file import read_recording
from tests.engine.tiny_engine import outputs, prompt, request, tiny_core

PROMPTS = {"first": prompt(40, 1), "a-name-to-hide": prompt(9, 2), "third": prompt(90, 3)}
MODEL = "random:deepseek_v32,layers=3"
"""Three prompts over three layers, the last with experts; the second prompt goes DENSE."""


def record(folder: Path, steps: str = "1..2", **flags: Any) -> list[Path]:
    """Run PROMPTS and record these steps; the files in order."""
    core = tiny_core(record=str(folder), record_steps=steps, **{"model": MODEL, **flags})
    outputs(core, [request(name, ids, 3) for name, ids in PROMPTS.items()])
    return sorted(folder.iterdir())


def load(folder: Path, steps: str = "1..2", **flags: Any) -> list[Recording]:
    """The same, read back."""
    return [read_recording(path) for path in record(folder, steps, **flags)]


def calls_of(recording: Recording, op: str) -> list[tuple[int, RecordedCall]]:
    """The calls of one operator with their numbers."""
    return [(n, call) for n, call in enumerate(recording.calls) if call.op == op]


def with_kernel(op: str, kernel: Callable[..., Any]) -> KernelSet:
    """The torch provider with another kernel for one operator."""
    return KernelSet("wrong", 1, {**TORCH.kernels, op: kernel})


def shifted(op: str, place: tuple[int, ...], by: float) -> KernelSet:
    """The torch provider, but one number of one result of ``op`` is off."""

    def kernel(*arguments: Any) -> Any:
        return _shift(TORCH.kernels[op](*arguments), place, by)

    return with_kernel(op, kernel)


def _shift(result: Any, place: tuple[int, ...], by: float) -> Any:
    if isinstance(result, TopK):
        return replace(result, ids=_shift(result.ids, place, by))
    if isinstance(result, tuple):
        return (_shift(result[0], place, by), *result[1:])
    changed: Tensor = result.clone()
    if all(at < size for at, size in zip(place, changed.shape, strict=True)):
        changed[place] += torch.tensor(by).to(changed.dtype)
    return changed


WRONG = shifted("sparse_mla", (5, 2, 7), 0.01)
"""For the command line: tests.unit.recording.recorded:WRONG."""
