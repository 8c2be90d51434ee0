"""The smallest kernel of Triton: whether its compiler, its launchers and the driver go together.

In:  x [N] on a GPU. Out: x + 1. Imported where Triton is there (device_probe.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit
def plus_one_kernel(source, target, num, BLOCK: tl.constexpr):
    """A block of numbers."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = place < num
    tl.store(target + place, tl.load(source + place, mask=held) + 1, mask=held)


def plus_one(source: Tensor) -> Tensor:
    """Module docstring."""
    target = torch.empty_like(source)
    plus_one_kernel[(triton.cdiv(source.numel(), BLOCK),)](
        source, target, source.numel(), BLOCK=BLOCK
    )
    return target
