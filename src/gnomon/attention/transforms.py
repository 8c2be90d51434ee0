"""The only functions that make a Geometry from another one; each result is new and checked.

In:  a Geometry (never changed), and a host decision: how many rows, which rows, which ranks.
Out: a Geometry whose live rows keep their request, position, kv_len, and with them every key that
     they see; padding rows follow the padding contract of geometry.py.
Here: pad_rows, select, split. In sharding.py: shard_rows, gather_rows. In drafts.py:
     expand_drafts, advance. In row_tensor.py: rehome, for values. All are exported from here.

What happens to the writes. Where the write axis is the row axis, or its gathering over ranks,
pad_rows and split carry the writes along. ``select`` leaves them: a subset of rows attends, all
rows write. Requests and page tables are kept as they are, so request numbers stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis, take_axis, take_rows
from gnomon.attention.drafts import advance, expand_drafts
from gnomon.attention.geometry import Geometry, WriteSlots
from gnomon.attention.row_tensor import rehome
from gnomon.attention.sharding import ShardStrategy, gather_rows, shard_rows
from gnomon.errors import GeometryError

__all__ = [
    "ShardStrategy",
    "advance",
    "expand_drafts",
    "gather_rows",
    "pad_rows",
    "rehome",
    "select",
    "shard_rows",
    "split",
]


def pad_rows(geometry: Geometry, num_rows: int) -> Geometry:
    """Append padding rows up to ``num_rows`` (graph bucket, MoE or DP sync).

    On a context-parallel shard every rank pads to the same ``num_rows``, and the gathered write
    axis grows in each rank's block. Raises GeometryError if the rows are more already.
    """
    axis = geometry.rows
    if num_rows < axis.num_rows:
        raise GeometryError(
            f"pad_rows({num_rows}) of '{axis.label}', which has {axis.num_rows} rows; "
            "padding never drops rows: choose a larger bucket, or select() the live rows first"
        )
    if num_rows == axis.num_rows:
        return geometry
    source = np.full(num_rows, -1, dtype=np.int64)
    source[: axis.num_rows] = np.arange(axis.num_rows)

    def pad(data: Tensor, fill: int) -> Tensor:
        return torch.cat((data, data.new_full((num_rows - axis.num_rows,), fill)))

    rows = replace(
        axis,
        request=pad(axis.request, -1),
        position=pad(axis.position, 0),
        kv_len=pad(axis.kv_len, 0),
        label=f"{axis.label} > pad {num_rows}",
        rank_rows=(),
    )
    writes = _carry_writes(geometry.writes, axis, rows, source)
    return replace(geometry, rows=rows, writes=writes)


def select(geometry: Geometry, rows: Sequence[int] | np.ndarray) -> Geometry:
    """Only the given rows, in the given order; the writes stay those of all rows.

    Raises GeometryError for a row out of range or named twice.
    """
    axis = geometry.rows
    chosen = np.asarray(rows, dtype=np.int64).reshape(-1)
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < axis.num_rows:
        raise GeometryError(
            f"select of '{axis.label}': rows {chosen.min()}..{chosen.max()}; "
            f"allowed are 0..{axis.num_rows - 1}"
        )
    if len(np.unique(chosen)) < len(chosen):
        raise GeometryError(f"select of '{axis.label}': a row is named twice in {chosen[:32]}")
    label = f"{axis.label} > select {len(chosen)} of {axis.num_rows}"
    return replace(geometry, rows=take_axis(axis, chosen, label))


def split(geometry: Geometry, parts: Sequence[int]) -> tuple[Geometry, ...]:
    """Consecutive parts of ``parts[i]`` rows each (two-batch overlap); each writes its own rows.

    A request may be cut: its later rows see keys that an earlier part writes, so within a layer
    the parts write in order. Raises GeometryError if the counts do not add up to the rows, or the
    rows are a selection whose writes belong to other rows.
    """
    axis = geometry.rows
    if sum(parts) != axis.num_rows or min(parts, default=0) < 0:
        raise GeometryError(
            f"split of '{axis.label}' into {tuple(parts)} rows: they add up to {sum(parts)}, "
            f"the axis has {axis.num_rows}"
        )
    for group, write in geometry.writes.items():
        if write.axis is not axis and write.local is not axis:
            raise GeometryError(
                f"split of '{axis.label}': group '{group}' writes the rows of "
                f"'{write.axis.label}'; split before selecting rows"
            )
    made = []
    start = 0
    for i, count in enumerate(parts):
        source = np.arange(start, start + count, dtype=np.int64)
        rows = take_axis(axis, source, f"{axis.label} > part {i} of {len(parts)}")
        writes = _carry_writes(geometry.writes, axis, rows, source)
        made.append(replace(geometry, rows=rows, writes=writes))
        start += count
    return tuple(made)


def _carry_writes(
    writes: Mapping[str, WriteSlots], old: RowAxis, new: RowAxis, source: np.ndarray
) -> dict[str, WriteSlots]:
    """Writes after ``new`` row i took ``old`` row source[i]; unrelated writes stay.

    Where ``old`` is a rank's block of a gathered axis, every block changes alike.
    """
    carried: dict[str, WriteSlots] = {}
    gathered: dict[int, tuple[RowAxis, Tensor]] = {}  # groups that share an axis keep sharing it
    local = torch.from_numpy(source).to(old.device, non_blocking=True)
    for group, write in writes.items():
        if write.axis is old:
            carried[group] = WriteSlots(new, take_rows(write.slots, local, -1))
        elif write.local is old:
            if id(write.axis) not in gathered:
                gathered[id(write.axis)] = _change_blocks(write.axis, new, source)
            axis, index = gathered[id(write.axis)]
            carried[group] = WriteSlots(axis, take_rows(write.slots, index, -1), new)
        else:
            carried[group] = write
    return carried


def _change_blocks(axis: RowAxis, new: RowAxis, source: np.ndarray) -> tuple[RowAxis, Tensor]:
    """The gathered axis after each rank's block took ``source``, and its source rows."""
    size, block = len(axis.rank_rows), axis.rank_rows[0]
    starts = np.arange(size, dtype=np.int64)[:, None] * block
    whole = np.where(source >= 0, source + starts, -1).reshape(-1)
    label = f"{new.label} > gather {size} ranks"
    made = replace(take_axis(axis, whole, label), rank_rows=(len(source),) * size)
    return made, torch.from_numpy(whole).to(axis.device, non_blocking=True)
