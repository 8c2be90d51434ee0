"""On a GPU: the driver starts Triton's kernels and captures graphs, and the probe sees it."""

from __future__ import annotations

import pytest
import torch

from gnomon.engine.config import EngineConfig
from gnomon.engine.device_probe import Probed, capture_a_graph, launch_a_kernel, probe_driver
from gnomon.engine.device_probe_triton import plus_one
from gnomon.engine.machine import probe_machine

pytestmark = pytest.mark.gpu


def test_a_whole_driver_passes() -> None:
    launch_a_kernel()
    capture_a_graph()
    machine = probe_machine("cuda")
    assert probe_driver(EngineConfig(device="cuda"), machine) == Probed(machine)


@pytest.mark.parametrize("length", [1, 127, 129])
def test_the_kernel_adds_one(length: int) -> None:
    numbers = torch.arange(length, dtype=torch.float32, device="cuda")
    assert torch.equal(plus_one(numbers), numbers + 1)
