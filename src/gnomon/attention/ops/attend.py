"""Attention over a whole key set: each segment by the sparse kernel, joined by lse, then the sink.

In:  queries [R, H, D_c] and [R, H, D_r], a pool, a KeySet on the same rows, its page table.
Out: (out, lse) of all segments together. Lists in POSITION space are converted here, by the one
checked function; a range becomes a list just before its kernel, as wide as its longest row.
A sink s takes part in the softmax's sum and adds no value: out · 1 / (1 + e^(s − lse)); the lse is
that of the keys alone. Not here: who selected the keys (select.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.geometry import PageTable
from gnomon.attention.indices import KeySet, ListSegment, Segment, Space, to_slots
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.workspace import UnpackedMla
from gnomon.errors import UnsupportedError

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SparseMlaKernel:
    """A kernel of sparse_mla that can leave the lse out where nobody reads it.

    ``values``: takes what the kernel takes and gives its ``out`` alone, with the same bits.
    """

    kernel: Kernel
    values: Kernel

    def __call__(self, *arguments: Any) -> Any:
        """(out, lse)."""
        return self.kernel(*arguments)


def values_of(kernel: Kernel) -> Kernel:
    """What gives the ``out`` of a kernel of sparse_mla alone."""
    own: Kernel | None = getattr(kernel, "values", None)
    return own if own is not None else lambda *arguments: kernel(*arguments)[0]


def has_values(kernel: Kernel) -> bool:
    """Whether a kernel of sparse_mla can leave the lse out."""
    return hasattr(kernel, "values")


def attend_key_set(
    kernels: Mapping[str, Kernel],
    queries: tuple[Tensor, Tensor],
    pool: PagedPool,
    keys: KeySet,
    table: PageTable,
    scale: float,
    unpacked: UnpackedMla | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [R, H, D_c], lse [R, H]). UnsupportedError for several parts or a workspace.

    ``unpacked``: attends packed pools by way of a workspace, where that is quicker.
    """
    merged: tuple[Tensor, Tensor] | None = None
    for attend, read, slots, count in _calls(kernels, pool, keys, table, unpacked):
        one = attend(*queries, read, slots, count, scale)
        merged = one if merged is None else kernels["lse_merge"](*merged, *one)
    assert merged is not None  # one part means at least one segment
    return merged if keys.sink is None else _apply_sink(*merged, keys.sink)


def attend_values(
    kernels: Mapping[str, Kernel],
    queries: tuple[Tensor, Tensor],
    pool: PagedPool,
    keys: KeySet,
    table: PageTable,
    scale: float,
    unpacked: UnpackedMla | None = None,
) -> Tensor:
    """``out`` of attend_key_set alone, without the lse where the kernel can leave it out."""
    if len(keys.segments) == 1 and keys.sink is None:
        ((attend, read, slots, count),) = _calls(kernels, pool, keys, table, unpacked)
        out: Tensor = values_of(attend)(*queries, read, slots, count, scale)
        return out
    return attend_key_set(kernels, queries, pool, keys, table, scale, unpacked)[0]


def _calls(
    kernels: Mapping[str, Kernel],
    pool: PagedPool,
    keys: KeySet,
    table: PageTable,
    unpacked: UnpackedMla | None,
) -> Iterator[tuple[Kernel, PagedPool, Tensor, Tensor]]:
    """(kernel, pool that it reads, slots, count) of each segment."""
    parts = {segment.part for segment in keys.segments}
    if len(parts) != 1:
        raise UnsupportedError(
            f"sparse_mla reads one pool, this key set names parts {sorted(parts)}; call it once a "
            "part and join the results with lse_merge"
        )
    attend, workspace = kernels["sparse_mla"], None
    if unpacked is not None and unpacked.pays(pool, keys.axis):
        attend, workspace = unpacked.attend, unpacked.workspace(pool, keys.axis, table)
    for segment in keys.segments:
        slots, read = _slots(segment, keys.axis, table), pool
        if unpacked is not None and workspace is not None:
            slots, read = unpacked.move(slots, workspace.page_map, pool.page_size), workspace.pool
        yield attend, read, slots, segment.count


def _slots(segment: Segment, axis: RowAxis, table: PageTable) -> Tensor:
    if not isinstance(segment, ListSegment):
        width = int(segment.count.max()) if segment.num_rows else 0
        columns = torch.arange(width, dtype=torch.int32, device=axis.device)
        ids = segment.start[:, None] + columns
        ids = ids.masked_fill(columns >= segment.count[:, None], -1)
        segment = ListSegment(segment.part, Space.POSITION, ids, segment.count)
    if segment.space is Space.POSITION:
        segment = to_slots(segment, axis, table)
    if segment.space is not Space.SLOT:
        raise UnsupportedError(
            f"sparse_mla reads a paged pool, the list of {segment.part!r} is in {segment.space} "
            "space; give it in POSITION or SLOT space"
        )
    return segment.ids


def _apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    # An empty row keeps its zeros also where the sink is −inf, whose difference to −inf is NaN.
    share = torch.sigmoid(lse - sink.to(lse.dtype)).masked_fill(lse == -torch.inf, 0)
    return (out * share[..., None]).to(out.dtype), lse
