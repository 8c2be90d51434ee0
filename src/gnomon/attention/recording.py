"""A recording: the operator calls of one step, complete enough to be run again anywhere.

In:  made by recording_capture.Capture while a step runs, or read from a file (recording_file.py).
Out: frozen values on the CPU. Of a pool a call keeps only the entries that it reads or writes, in
     pages renumbered from 1 in ascending order (page 0 stays the null page); all other bytes of
     the rebuilt pages are 0xFF, which is NaN in every float format, so that a kernel that reads
     or writes beside its entries shows.
Not here: running (recording_replay.py), what a user may not see (recording_redact.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry
from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.layouts.rows import put_rows
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.recording_calls import SHAPES, Arguments, touched_slots
from gnomon.attention.routes import AttentionDims

POISON = 0xFF


@dataclass(frozen=True, slots=True, eq=False)
class PoolPart:
    """Entries of a pool: ``entries[U]`` (uint8, a token's planes side by side) at ``slots[U]``.

    Slots count in the renumbered pages; ``page_ids[n]`` (ascending, the null page 0 first) are
    the numbers that those pages had in the pool.
    """

    layout: KVLayout
    page_size: int
    page_ids: Tensor
    slots: Tensor
    entries: Tensor

    def build(self, device: torch.device | str = "cpu") -> PagedPool:
        """A pool of the renumbered pages, poisoned beside the entries."""
        pool = self.layout.allocate(int(self.page_ids.shape[0]), self.page_size, device)
        pool.storage.fill_(POISON)
        begin = 0
        for plane, width in zip(pool.planes, self.layout.plane_widths, strict=True):
            rows = self.entries.narrow(1, begin, width).to(device)
            put_rows(plane, self.slots.to(device), rows)
            begin += width
        return pool

    def stray_slots(self, pool: PagedPool) -> Tensor:
        """Slots of a pool made by ``build`` that hold neither an entry nor poison any more."""
        every = torch.arange(pool.num_slots, device=pool.device)
        is_touched = torch.zeros(pool.num_slots, dtype=torch.bool, device=pool.device)
        is_touched[self.slots.to(pool.device)] = True
        held = pool.layout.gather_bytes(pool, every)
        changed: Tensor = ((held != POISON).any(-1) & ~is_touched).nonzero()[:, 0]
        return changed


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One call of one operator's kernel.

    arguments: as the kernel takes them, with a PoolPart in the place of the pool; empty if
    ``withheld`` says why they were not kept. results: tensors by name (recording_calls.observed);
    None if the call raised ``error``. rows: by group of rows (CallShape), the row of the step
    that each row of the call is, where that is known; where a call is too large to be kept whole
    it has fewer rows than the step.
    """

    op: str
    layer: int | None
    part: str | None = None
    arguments: Arguments = ()
    results: Mapping[str, Tensor] | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    error: str = ""
    withheld: str = ""

    def build(self, device: torch.device | str = "cpu") -> Arguments:
        """Arguments to call a kernel with, on ``device``; a fresh pool each time."""
        moved: dict[int, Any] = {}  # one value that stands in two places stays one value

        def on_device(value: Any) -> Any:
            if id(value) not in moved:
                moved[id(value)] = _on_device(value, device)
            return moved[id(value)]

        return tuple(
            tuple(on_device(one) for one in value) if isinstance(value, tuple) else on_device(value)
            for value in self.arguments
        )

    def without_data(self, why: str) -> RecordedCall:
        """Only the fact that the call happened."""
        return RecordedCall(self.op, self.layer, self.part, error=self.error, withheld=why)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """What was run: geometry and names. ``plan`` is the StepPlan as plain values.

    ``request_ids`` and ``token_ids`` [R] are None in a redacted recording.
    """

    step_id: int
    geometry: Geometry
    plan: Mapping[str, Any]
    request_ids: tuple[str, ...] | None
    token_ids: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The calls of one step, in order.

    origin: facts for the reader (versions, model, dtype). providers: who ran each operator.
    reason: "chosen" or "failed". error: what the step raised. hidden_size: width of the model's
    hidden state, by which redaction knows it.
    """

    origin: Mapping[str, str]
    dims: AttentionDims
    hidden_size: int
    providers: Mapping[str, str]
    calls: tuple[RecordedCall, ...]
    step: RecordedStep | None = None
    reason: str = "chosen"
    error: str = ""
    is_redacted: bool = False


def pool_part(op: str, arguments: Arguments) -> tuple[PoolPart, Arguments]:
    """Copy what a call reads or writes of its pool; the arguments with it, in renumbered pages."""
    shape = SHAPES[op]
    assert shape.pool is not None
    pool: PagedPool = arguments[shape.pool]
    size = pool.page_size
    touched = touched_slots(op, arguments)
    named = [touched.new_zeros(1), touched // size]
    if shape.pages is not None:
        named.append(arguments[shape.pages].reshape(-1).to(touched.dtype))
    page_ids: Tensor = torch.unique(torch.cat(named))

    def renumbered(slots: Tensor) -> Tensor:
        wide = slots.long()
        page = torch.searchsorted(page_ids, wide.clamp_min(0) // size)
        return torch.where(wide < 0, -1, page * size + wide.clamp_min(0) % size)

    part = PoolPart(
        layout=pool.layout,
        page_size=size,
        page_ids=page_ids.cpu(),
        slots=renumbered(touched).cpu(),
        entries=pool.layout.gather_bytes(pool, touched).cpu(),
    )
    kept = list(arguments)
    kept[shape.pool] = part
    if shape.slots is not None:
        kept[shape.slots] = renumbered(arguments[shape.slots]).to(arguments[shape.slots].dtype)
    if shape.pages is not None:
        pages = arguments[shape.pages]
        kept[shape.pages] = torch.searchsorted(page_ids, pages.to(page_ids.dtype)).to(pages.dtype)
    return part, tuple(kept)


def value_bytes(value: Any) -> int:
    """Bytes of the tensors in one argument or result."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, RopeRows):
        return 2 * value.cos.numel() * value.cos.element_size()
    if isinstance(value, PoolPart):
        return value.entries.numel()
    if isinstance(value, IndexTransform):
        return 2 * value_bytes(value.norm_weight)
    if isinstance(value, tuple):
        return sum(value_bytes(one) for one in value)
    return 0


def _on_device(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, PoolPart):
        return value.build(device)
    if isinstance(value, RopeRows):
        return replace(value, cos=value.cos.to(device), sin=value.sin.to(device))
    if isinstance(value, IndexTransform):
        return IndexTransform(
            value.norm_weight.to(device),
            value.norm_bias.to(device),
            value.norm_eps,
            value.has_hadamard,
        )
    return value
