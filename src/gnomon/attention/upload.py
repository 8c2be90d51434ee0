"""Host arrays to the device: all of a step's arrays in one pinned copy that nobody waits for.

In:  numpy arrays, a device.
Out: tensors of the same shapes and dtypes there. On a CPU they share the arrays' memory. On a GPU
     they are views of one buffer, 16-byte aligned, filled by one asynchronous copy on the current
     stream. Its pinned memory comes from torch's caching host allocator, which gives a block to
     somebody else only when the copy out of it is over.
Not here: which arrays a step needs (geometry.py, the engine's batch).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16


def upload(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """One tensor per array (module docstring)."""
    where = torch.device(device)
    if where.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return through_staging(arrays, where, is_pinned=where.type == "cuda")


def through_staging(
    arrays: Sequence[np.ndarray], device: torch.device, is_pinned: bool
) -> list[Tensor]:
    """The same by way of one buffer, on any device."""
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    staging = torch.empty(total, dtype=torch.uint8, pin_memory=is_pinned)
    bytes_of = staging.numpy()
    for start, array in zip(starts, arrays, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1)
        bytes_of[start : start + array.nbytes] = flat.view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of a numpy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
