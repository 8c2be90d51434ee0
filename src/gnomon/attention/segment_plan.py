"""The plan of what lies between two attentions: rows of a bucket, of which the host knows nothing.

In:  fixed buffers for R rows (SegmentRows); the model's dims.
Out: the buckets; a Geometry over the buffers, of no requests; a StepPlan by which a model prepares
     every row for the SPARSE route. Whatever reads keys (index scores, top-k, attention) has no
     plan here: it runs with that of the live step.
What lies between two attentions treats each row by itself, so only the number of rows has to fit.
Rows behind the live ones follow the padding contract.
Not here: capturing, and filling the buffers (the engine's prefill_graphs.py, segment_buffers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gnomon.attention.axes import HostLengths, RequestAxis, RowAxis
from gnomon.attention.geometry import Geometry, PageTable, WriteSlots
from gnomon.attention.plan import StepPlan
from gnomon.attention.routes import AttentionDims
from gnomon.attention.row_tensor import RowSubset

__all__ = ["SegmentRows", "plan_segments", "segment_bucket", "segment_buckets", "segment_geometry"]

SMALL = (8, 16, 32, 64, 128)  # up to here weights are read, and padding costs next to nothing
STEP = 256  # further on rows are computed
MAX_PADDING = 2  # a bucket of more than so many times the rows is refused


def segment_buckets(most: int, multiple: int = 1) -> tuple[int, ...]:
    """Rows of the captured steps, ascending: 8, 16, ..., 128, 256, 384, 512, 768, ..., ``most``.

    Each is a multiple of ``multiple``; none is above ``most``, which is one of them if it may.
    """
    wished = [*SMALL, STEP, 384, *range(2 * STEP, most, STEP), most]
    rounded = {rows // multiple * multiple for rows in wished if rows <= most}
    return tuple(sorted(rounded - {0}))


def segment_bucket(num_rows: int, buckets: Sequence[int]) -> int | None:
    """The least bucket that holds ``num_rows``; None if none does, or most of it were padding."""
    fitting = [bucket for bucket in buckets if num_rows <= bucket <= MAX_PADDING * num_rows]
    return fitting[0] if fitting else None


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRows:
    """Buffers of fixed address for R rows; R follows from their shapes.

    token_ids int64, request (-1 for padding), position, kv_len int32 [R]; slots int64 [R] by cache
    group.
    """

    token_ids: Tensor
    request: Tensor
    position: Tensor
    kv_len: Tensor
    slots: Mapping[str, Tensor]


def segment_geometry(rows: SegmentRows, page_size: int) -> Geometry:
    """The geometry that reads ``rows``: where they write is in it, what they read is not."""
    axis = RowAxis(
        request=rows.request,
        position=rows.position,
        kv_len=rows.kv_len,
        num_live=0,
        spans=(),
        label=f"captured rows between attentions, {rows.request.shape[0]}",
        is_exact=False,
    )
    nobody = rows.request[:0]
    return Geometry(
        requests=RequestAxis(nobody, nobody, HostLengths((), (), is_exact=False)),
        rows=axis,
        tables={group: PageTable(group, nobody.view(0, 1), page_size) for group in rows.slots},
        writes={group: WriteSlots(axis, slots) for group, slots in rows.slots.items()},
    )


def plan_segments(geometry: Geometry, dims: AttentionDims, group: str = "tokens") -> StepPlan:
    """The plan of a geometry by ``segment_geometry``: every row SPARSE, no keys anywhere."""
    axis = geometry.rows
    return StepPlan(
        axis=axis,
        dims=dims,
        group=group,
        routes=(),
        sparse=RowSubset(axis, axis, None),
        dense=None,
        index_width=dims.index_topk,
        score_chunks=(),
        lists=None,
        context_chunks=(),
        scratch_bytes=0,
        bucket=axis.num_rows,
        graph_key=None,
    )
