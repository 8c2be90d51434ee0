"""A provider's kernels seen from the CPU: arguments go to the GPU, results and pools come back.

In:  a provider. Out: `OnGpu`, a provider for check_provider, which draws, runs the reference and
     compares on the CPU; `wrong_cases`, the results that are not right, as short lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.dispatch import KernelSet, OpNeed, Provider, Verdict
from gnomon.attention.layouts import PagedPool
from gnomon.attention.ops.values import IndexTransform, RopeRows, TopK
from gnomon.attention.spec import OpSpec, Scale, check_provider


def on_device(value: Any, device: str) -> Any:
    """The same value there: tensors with their strides, pools, rotations, transforms, tuples."""
    if isinstance(value, tuple):
        return tuple(on_device(one, device) for one in value)
    if isinstance(value, PagedPool):
        return PagedPool(value.layout, value.storage.to(device), value.page_size)
    if isinstance(value, RopeRows):
        turns = value.cos.to(device), value.sin.to(device)
        return RopeRows(value.axis, *turns, value.is_interleaved)
    if isinstance(value, TopK):
        parts = value.ids, value.count, value.margin, value.nan_rows, value.slots
        return TopK(*(on_device(part, device) for part in parts))
    if isinstance(value, IndexTransform):
        norm = value.norm_weight.to(device), value.norm_bias.to(device)
        return IndexTransform(*norm, value.norm_eps, value.has_hadamard)
    if isinstance(value, Tensor):
        length = value.untyped_storage().nbytes() // value.element_size()
        whole = value.as_strided((length,), (1,), 0).to(device)
        return whole.as_strided(value.size(), value.stride(), value.storage_offset())
    return value


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A provider that runs on the GPU what it is given on the CPU."""

    inner: KernelSet

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def rank(self) -> int:
        return self.inner.rank

    def supports(self, op: str, need: OpNeed) -> Verdict:
        return self.inner.supports(op, need)

    def scratch_bytes(self, op: str, need: OpNeed) -> int:
        return self.inner.scratch_bytes(op, need)

    def prepare(self, axis: RowAxis) -> object | None:
        return self.inner.prepare(axis)

    def fusion(self, name: str, need: OpNeed) -> Callable[..., Any] | None:
        return self.inner.fusion(name, need)

    def kernel(self, op: str, need: OpNeed | None = None) -> Callable[..., Any]:
        kernel = self.inner.kernel(op, need)

        def run(*arguments: Any) -> Any:
            moved = tuple(on_device(argument, "cuda") for argument in arguments)
            result = kernel(*moved)
            for here, there in zip(arguments, moved, strict=True):
                if isinstance(here, PagedPool):
                    here.storage.copy_(there.storage)
            return on_device(result, "cpu")

        return run


def wrong_cases(spec: OpSpec, provider: Provider, dtype: torch.dtype, scale: Scale) -> list[str]:
    """Cases whose result is not within the spec's tolerance of the reference."""
    wrong = []
    for case in spec.cases(torch.Generator().manual_seed(1), dtype, scale):
        result = check_provider(spec, provider, case, dtype)
        if not result.is_ok:
            wrong.append(f"{spec.name}, {case.label}: {result.worst:.3g} at {result.where}")
    return wrong
