"""The plan of a captured decode step: static shapes for a bucket of rows, counts on the device.

In:  how many rows may decode at once; fixed buffers of a bucket (StaticRows); what the step needs.
Out: the buckets; a Geometry over the buffers whose host twins are upper bounds; a StepPlan that
     holds for every step that the buffers will ever describe.
Row r of a bucket is request r. Every row is scored against the whole width of its page table in
paged chunks of neighbouring rows, as many as the score budget allows (one chunk, as a rule): how
many keys a row has is read by the kernels from its kv_len. A row of at most index_topk keys gets
them all from the same top-k. Rows without a request follow the padding contract.
Not here: capturing, and filling the buffers (the engine's graphs.py and graph_buffers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gnomon.attention.axes import HostLengths, RequestAxis, RowAxis, RowSpan
from gnomon.attention.geometry import Geometry, PageTable, WriteSlots
from gnomon.attention.plan import GraphKey, StepPlan
from gnomon.attention.plan_limits import Budget, Capabilities
from gnomon.attention.routes import AttentionDims, Route
from gnomon.attention.row_tensor import RowSubset
from gnomon.attention.score_chunks import PagedScoreChunk, score_bytes
from gnomon.errors import ConfigError

__all__ = ["StaticRows", "bucket_of", "decode_buckets", "decode_geometry", "plan_decode"]

BUCKET_STEP = 8
MAX_PADDING = 2  # a bucket of more than so many times the live rows is refused


def decode_buckets(max_rows: int, multiple: int = 1) -> tuple[int, ...]:
    """Rows of the captured steps, ascending: 1, 2, 4, 8, 16, 24, ..., up to ``max_rows``.

    Each is a multiple of ``multiple``; the last one holds max_rows.
    """
    wished = [1, 2, 4, *range(BUCKET_STEP, max_rows, BUCKET_STEP), max_rows]
    rounded = {-(-rows // multiple) * multiple for rows in wished if rows <= max_rows}
    return tuple(sorted(rounded))


def bucket_of(num_rows: int, buckets: Sequence[int]) -> int | None:
    """The least bucket that holds ``num_rows``; None if none does, or it were padding for the most.

    A step without live rows fits the first bucket.
    """
    fitting = [bucket for bucket in buckets if bucket >= num_rows]
    if not fitting:
        return None
    is_first = fitting[0] == buckets[0]  # the least there is: a multiple of rows may be asked for
    return fitting[0] if is_first or fitting[0] <= MAX_PADDING * num_rows else None


@dataclass(frozen=True, slots=True, eq=False)
class StaticRows:
    """Buffers of fixed address for R rows, one a request; R follows from their shapes.

    request (-1 for padding), position, kv_len, query_len int32 [R]; by cache group: pages int32
    [R, N] and slots int64 [R].
    """

    request: Tensor
    position: Tensor
    kv_len: Tensor
    query_len: Tensor
    pages: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]


def decode_geometry(rows: StaticRows, page_size: int, max_len: int) -> Geometry:
    """The geometry that reads ``rows``; no request will have more than ``max_len`` tokens."""
    num_rows = rows.request.shape[0]
    host = HostLengths((1,) * num_rows, (max_len,) * num_rows, is_exact=False)
    axis = RowAxis(
        request=rows.request,
        position=rows.position,
        kv_len=rows.kv_len,
        num_live=num_rows,
        spans=tuple(RowSpan(r, r, r + 1, max_len - 1) for r in range(num_rows)),
        label=f"captured decode of {num_rows} rows",
        is_exact=False,
    )
    return Geometry(
        requests=RequestAxis(rows.query_len, rows.kv_len, host),
        rows=axis,
        tables={group: PageTable(group, pages, page_size) for group, pages in rows.pages.items()},
        writes={group: WriteSlots(axis, slots) for group, slots in rows.slots.items()},
    )


def plan_decode(
    geometry: Geometry,
    dims: AttentionDims,
    capabilities: Capabilities,
    budget: Budget,
    group: str = "tokens",
) -> StepPlan:
    """The plan of a geometry by ``decode_geometry``. ConfigError if one row passes the budget.

    ``lists`` is None: they follow from device values, so a capture makes them in its own step.
    """
    axis, table = geometry.rows, geometry.tables[group]
    num_rows = axis.num_rows
    longest = max(geometry.requests.host.kv_len, default=0)
    width = dims.index_topk or longest
    num_keys = min(table.capacity, -(-longest // table.page_size) * table.page_size)
    chunks = []
    if 0 < dims.index_topk < longest:
        one = score_bytes(PagedScoreChunk((0,), 0, num_keys), dims, capabilities)
        most = budget.score_bytes // one
        if most < 1:
            raise ConfigError(
                f"score budget of {budget.score_bytes} bytes: one row of {num_keys} keys takes "
                f"{one}; raise Budget.score_bytes, lower max_model_len, or set --enforce-eager"
            )
        chunks = [
            PagedScoreChunk(tuple(range(start, min(start + most, num_rows))), 0, num_keys)
            for start in range(0, num_rows, most)
        ]
    return StepPlan(
        axis=axis,
        dims=dims,
        group=group,
        routes=(Route.SPARSE,) * num_rows,
        sparse=RowSubset(axis, axis, None),
        dense=None,
        index_width=width,
        score_chunks=tuple(chunks),
        lists=None,
        context_chunks=(),
        scratch_bytes=max((score_bytes(c, dims, capabilities) for c in chunks), default=0),
        bucket=num_rows,
        graph_key=GraphKey(num_rows, num_rows, width),
    )
