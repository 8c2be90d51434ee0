"""An engine whose third step names memory that is not there; a process starts `build*`.

In:  an EngineConfig. Out: an EngineCore whose runner, in its third step, reads far outside of a
tensor on the device, as a kernel with a wrong address does: `build` by torch, which asserts,
`build_triton` by a kernel of Triton, whose launches then raise errors of their own class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore, build_core

FAULTY_STEP = 3


@triton.jit
def read_far(source, target, distance):
    tl.store(target, tl.load(source + distance))


def by_torch() -> None:
    """Asserts on the device."""
    torch.zeros(8, device="cuda").index_select(0, torch.tensor([1 << 20], device="cuda"))


def by_triton() -> None:
    """An illegal memory access."""
    source, target = torch.zeros(8, device="cuda"), torch.zeros(1, device="cuda")
    read_far[(1,)](source, target, 1 << 44)
    for _ in range(1000):  # one of them meets the error, and says so in Triton's words
        read_far[(1,)](source, target, 0)


def build(config: EngineConfig, progress: Any, default_vocab_size: int | None = None) -> EngineCore:
    return faulty_core(config, progress, default_vocab_size, by_torch)


def build_triton(
    config: EngineConfig, progress: Any, default_vocab_size: int | None = None
) -> EngineCore:
    return faulty_core(config, progress, default_vocab_size, by_triton)


def faulty_core(
    config: EngineConfig, progress: Any, vocab_size: int | None, fault: Callable[[], None]
) -> EngineCore:
    core = build_core(config, progress, vocab_size)
    runner = core._parts.runner
    run, steps = runner.run, []

    def faulty(batch: Any, *rest: Any, **named: Any) -> Any:
        steps.append(1)
        if len(steps) == FAULTY_STEP:
            fault()
        return run(batch, *rest, **named)

    runner.run = faulty  # type: ignore[method-assign]  # the fault that is planted
    return core
