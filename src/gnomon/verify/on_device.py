"""A provider's kernels seen from the CPU: arguments go to a device, results and pools come back.

In:  a provider, a device. Out: `OnDevice`, a provider for check_provider, which draws cases, runs
     the reference and compares on the CPU.
Not here: comparing (attention/spec), which providers there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.dispatch import OpNeed, Provider, Verdict
from gnomon.attention.layouts import PagedPool
from gnomon.attention.ops.values import IndexTransform, RopeRows, TopK


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
class OnDevice:
    """A provider that runs on `device` what it is given on the CPU."""

    inner: Provider
    device: str

    @property
    def name(self) -> str:
        """The inner one's."""
        return self.inner.name

    @property
    def rank(self) -> int:
        """The inner one's."""
        return self.inner.rank

    def supports(self, op: str, need: OpNeed) -> Verdict:
        """As the inner one says."""
        return self.inner.supports(op, need)

    def scratch_bytes(self, op: str, need: OpNeed) -> int:
        """As the inner one says."""
        return self.inner.scratch_bytes(op, need)

    def prepare(self, axis: RowAxis) -> object | None:
        """As the inner one does."""
        return self.inner.prepare(axis)

    def fusion(self, name: str, need: OpNeed) -> Callable[..., Any] | None:
        """The inner one's."""
        return self.inner.fusion(name, need)

    def kernel(self, op: str, need: OpNeed | None = None) -> Callable[..., Any]:
        """The inner one's, between two moves."""
        kernel = self.inner.kernel(op, need)

        def run(*arguments: Any) -> Any:
            moved = tuple(on_device(argument, self.device) for argument in arguments)
            result = kernel(*moved)
            for here, there in zip(arguments, moved, strict=True):
                if isinstance(here, PagedPool):
                    here.storage.copy_(there.storage)
            return on_device(result, "cpu")

        return run
