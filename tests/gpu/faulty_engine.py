"""An engine whose third step names memory that is not there; `build` is what a process starts.

In:  an EngineConfig. Out: an EngineCore whose runner, from its third step on, reads far outside of
a tensor on the device, as a kernel with a wrong address does.
"""

from __future__ import annotations

from typing import Any

import torch

from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore, build_core

FAULTY_STEP = 3


def build(config: EngineConfig, progress: Any, default_vocab_size: int | None = None) -> EngineCore:
    core = build_core(config, progress, default_vocab_size)
    runner = core._parts.runner
    run, steps = runner.run, []

    def faulty(batch: Any, *rest: Any, **named: Any) -> Any:
        steps.append(1)
        if len(steps) == FAULTY_STEP:
            table = torch.zeros(8, device="cuda")
            table.index_select(0, torch.tensor([1 << 20], device="cuda"))  # asserts on the device
        return run(batch, *rest, **named)

    runner.run = faulty  # type: ignore[method-assign]  # the fault that is planted
    return core
