"""Small tensors on their way from the device to the host: one copy, and one wait when it is due.

In:  int64, bool or float tensors on one device.
Out: `Landing.wait()`: their values as numpy arrays of the shapes that went in: int64 and bool as
     they are, floats as float64. What is landed is a copy: buffers may be written again at once.
Not here: what the values mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Landing:
    """Starts the copy when it is made (module docstring)."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        packed = torch.cat([_as_words(tensor) for tensor in tensors])
        self._words = packed.to("cpu", non_blocking=True)  # into pinned memory
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types
            self._event.record()

    def wait(self) -> list[NDArray[Any]]:
        """Block until the values are there."""
        if self._event is not None:
            self._event.synchronize()
        found: list[NDArray[Any]] = []
        words, start = self._words.numpy(), 0
        for dtype, shape in self._kinds:
            part = words[start : start + shape.numel()].reshape(shape)
            start += shape.numel()
            if dtype.is_floating_point:
                part = part.view(np.float64)
            found.append(part.astype(np.bool_) if dtype is torch.bool else part)
        return found


def _as_words(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat.double().view(torch.int64) if flat.is_floating_point() else flat.long()
