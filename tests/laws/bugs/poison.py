"""Memory as an allocator hands it out on a bad day: every uninitialised tensor is full of poison.

In:  a block of code under ``with PoisonedMemory():``. Out: torch.empty and its kin return NaN for
     floats, 0x7f bytes for integers and True for booleans, so that a value nobody wrote shows.
`Ledger` notes the bytes of the largest tensor that any call made anew (views do not count).
Both see the calls that Python code makes, not what a kernel allocates inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


class PoisonedMemory(TorchFunctionMode):
    """See the module docstring. ``num_poisoned``: how many tensors were."""

    num_poisoned = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in EMPTY and out.numel():
            self.num_poisoned += 1
            if out.dtype.is_floating_point:
                out.fill_(torch.nan)
            else:
                out.view(torch.uint8).fill_(1 if out.dtype == torch.bool else 0x7F)
        return out


class Ledger(TorchFunctionMode):
    """``peak``: bytes of the largest tensor made; ``label`` says by what."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.label = 0, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and storage.nbytes() > self.peak:
                self.peak = storage.nbytes()
                self.label = f"{func.__name__} {tuple(tensor.shape)} {tensor.dtype}"
        return out
