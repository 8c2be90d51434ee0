"""A provider's kernels seen from the CPU: arguments go to the GPU, results and pools come back.

Out: `wrong_cases`, the results that are not right, as short lines; check_provider draws, runs the
     reference and compares on the CPU (verify/on_device.py).
"""

from __future__ import annotations

import torch

from gnomon.attention.dispatch import KernelSet, Provider
from gnomon.attention.spec import OpSpec, Scale, check_provider
from gnomon.verify.on_device import OnDevice, on_device

__all__ = ["OnGpu", "on_device", "wrong_cases"]


def OnGpu(inner: KernelSet) -> OnDevice:
    """The provider, run on the GPU."""
    return OnDevice(inner, "cuda")


def wrong_cases(spec: OpSpec, provider: Provider, dtype: torch.dtype, scale: Scale) -> list[str]:
    """Cases whose result is not within the spec's tolerance of the reference."""
    wrong = []
    for case in spec.cases(torch.Generator().manual_seed(1), dtype, scale):
        result = check_provider(spec, provider, case, dtype)
        if not result.is_ok:
            wrong.append(f"{spec.name}, {case.label}: {result.worst:.3g} at {result.where}")
    return wrong
