"""Tensors that belong to a row axis, and the only ways to carry one to another axis.

In:  a RowAxis and a tensor whose dim 0 runs over its rows.
Out: ``RowTensor``; ``require_axis`` refuses a value of another axis by both names; ``rehome``
     carries a value over a checked row map; ``RowSubset`` takes a subset and puts subsets back.
Not here: which rows are taken (plan.py, transforms.py), arithmetic on the data (ops/).

Axes are compared by identity: two axes of equal length and equal content are still two axes,
because a stage that pads or narrows one of them says so by making a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis, take_rows
from gnomon.errors import GeometryError

__all__ = ["OnAxis", "RowSubset", "RowTensor", "rehome", "require_axis"]


class OnAxis(Protocol):
    """Anything that names the row axis that it belongs to: RowTensor, KeySet, WriteSlots."""

    @property
    def axis(self) -> RowAxis: ...


@dataclass(frozen=True, slots=True, eq=False)
class RowTensor:
    """``data[R, ...]`` on the rows of ``axis``; any dtype, on the axis' device."""

    axis: RowAxis
    data: Tensor

    def __post_init__(self) -> None:
        if self.data.ndim == 0 or self.data.shape[0] != self.axis.num_rows:
            raise GeometryError(
                f"a tensor of shape {tuple(self.data.shape)} was put on row axis "
                f"'{self.axis.label}', which has {self.axis.num_rows} rows"
            )
        if self.data.device != self.axis.device:
            raise GeometryError(
                f"a tensor on {self.data.device} was put on row axis '{self.axis.label}', "
                f"which lies on {self.axis.device}"
            )


def require_axis(expected: RowAxis, **named: OnAxis) -> None:
    """Raise GeometryError unless every named value is on ``expected`` itself."""
    for name, value in named.items():
        if value.axis is not expected:
            raise GeometryError(
                f"{name} is on row axis '{value.axis.label}' ({value.axis.num_rows} rows), but "
                f"'{expected.label}' ({expected.num_rows} rows) is needed; "
                "carry it over with rehome() or RowSubset.take()"
            )


def rehome(
    value: RowTensor,
    axis: RowAxis,
    row_map: Sequence[int] | np.ndarray,
    *,
    match: Literal["token", "request"] = "token",
    fill: float = 0,
) -> RowTensor:
    """Carry ``value`` to ``axis``: row i becomes ``value.data[row_map[i]]``, or ``fill`` for -1.

    Checked both ways on host twins: every live row of ``axis`` has a live source row of the same
    request (and position, unless match="request": a draft's seed comes from an earlier row of its
    request), and padding rows have source -1. Raises GeometryError with the first row at fault.
    """
    source = np.asarray(row_map, dtype=np.int64)
    old = value.axis
    if source.shape != (axis.num_rows,):
        raise GeometryError(
            f"rehome to '{axis.label}': row map of shape {source.shape}, "
            f"({axis.num_rows},) is needed"
        )
    if source.size and not -1 <= source.min() <= source.max() < old.num_rows:
        raise GeometryError(
            f"rehome from '{old.label}': row map holds {source.min()}..{source.max()}; "
            f"allowed are rows 0..{old.num_rows - 1} and -1"
        )
    _check_row_map(old, axis, source, match)
    index = torch.from_numpy(source).to(axis.device, non_blocking=True)
    return RowTensor(axis, take_rows(value.data, index, fill))


def _check_row_map(old: RowAxis, new: RowAxis, source: np.ndarray, match: str) -> None:
    if not (old.is_exact and new.is_exact):
        raise GeometryError(
            f"rehome '{old.label}' -> '{new.label}': the host does not know the live rows; "
            "give advance() the accepted counts on the host first"
        )
    old_request, old_position = (
        np.append(twin, pad) for twin, pad in zip(old.host_rows(), (-1, 0), strict=True)
    )  # source -1 reads the appended padding row
    new_request, new_position = new.host_rows()
    wrong = old_request[source] != new_request
    if match == "token":
        wrong |= old_position[source] != new_position
    wrong |= (new_request < 0) & (source >= 0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise GeometryError(
            f"rehome '{old.label}' -> '{new.label}': row {row} is request {new_request[row]} "
            f"position {new_position[row]}, its source row {source[row]} is request "
            f"{old_request[source[row]]} position {old_position[source[row]]}; match={match!r} "
            "needs them equal, and -1 for padding rows"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowSubset:
    """Some rows of ``parent`` as an axis of their own. ``rows`` int64 [M] on the device.

    ``rows is None``: the subset is the parent itself (``axis is parent``), and take and restore
    cost nothing.
    """

    parent: RowAxis
    axis: RowAxis
    rows: Tensor | None

    def __post_init__(self) -> None:
        if (self.rows is None) != (self.axis is self.parent):
            raise GeometryError("RowSubset: rows is None exactly if the axis is its own parent")
        if self.rows is not None and tuple(self.rows.shape) != (self.axis.num_rows,):
            raise GeometryError(
                f"RowSubset: {tuple(self.rows.shape)} row numbers for axis '{self.axis.label}' "
                f"of {self.axis.num_rows} rows"
            )

    def take(self, value: RowTensor) -> RowTensor:
        """The rows of ``value`` (on the parent axis) that belong to this subset."""
        require_axis(self.parent, value=value)
        if self.rows is None:
            return value
        return RowTensor(self.axis, value.data.index_select(0, self.rows))

    @staticmethod
    def restore(parent: RowAxis, parts: Sequence[tuple[RowSubset, RowTensor]]) -> RowTensor:
        """Put disjoint subsets back on ``parent``; rows in no subset (padding) become zero.

        Raises GeometryError if a value is on another axis, a subset has another parent, or the
        live rows of the parts do not add up to those of the parent.
        """
        num_live = sum(subset.axis.num_live for subset, _ in parts)
        if num_live != parent.num_live or not parts:
            raise GeometryError(
                f"restore to '{parent.label}': {len(parts)} parts hold {num_live} live rows, "
                f"the axis has {parent.num_live}"
            )
        for subset, value in parts:
            require_axis(subset.axis, value=value)
            if subset.parent is not parent:
                raise GeometryError(
                    f"restore to '{parent.label}': part '{subset.axis.label}' was taken from "
                    f"'{subset.parent.label}'"
                )
        first = parts[0][1]
        if parts[0][0].rows is None:
            return first
        out = first.data.new_zeros((parent.num_rows, *first.data.shape[1:]))
        for subset, value in parts:
            if subset.rows is not None:
                out.index_copy_(0, subset.rows, value.data)
        return RowTensor(parent, out)
