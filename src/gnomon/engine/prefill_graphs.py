"""PrefillGraphs: what lies between the attentions of a prefill or mixed step, captured by rows.

In:  the model, its pools, operators that can be captured, sizes; then Batches.
Out: `capture`: for each bucket of rows one graph more than there are layers, the largest bucket
     first, out of one memory pool; `forward(batch, ...)`: hidden states and NaN flags of a live
     step, as the model's own forward gives them.
A graph runs from one attention to the next: output product, feed-forward, the next layer's norm and
products, rotation, cache writes. In between, eagerly and on the live rows alone, run index scores,
top-k and attention, with the step's own geometry, plan and operators: whatever reads keys. They
read what the graph before left, and write into one buffer at a fixed address that the graph after
reads. Rows behind the live ones follow the padding contract and reach no live row.
What a graph leaves for the attention behind it is lent: the memory belongs to the pool, which the
graphs hold, and later graphs take it again, so that one layer's worth serves all layers.
Graph = eager is a law; tests replay the same work without CUDA by another `Recorder`.
Not here: which steps come here (runner.py), the head and sampling (runner.py, sampler.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry, RowTensor
from gnomon.attention.indices import KeySet
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.segment_plan import (
    SegmentRows,
    plan_segments,
    segment_bucket,
    segment_geometry,
)
from gnomon.attention.step import AttentionStep
from gnomon.engine.batch import Batch
from gnomon.engine.graphs import MIB, GraphRules, Outputs, Recorder, Work, lent, reserved_bytes
from gnomon.engine.segment_buffers import SegmentBuffers
from gnomon.errors import GeometryError
from gnomon.models.indexer import IndexQuery
from gnomon.models.mla import Query
from gnomon.models.rotation import Rotations
from gnomon.models.sparse_mla_model import (
    ForwardOutput,
    LayerQueries,
    SparseMlaModel,
    Stream,
    any_fault,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """How to replay one part, and what it leaves for the attention behind it, of the bucket's rows.

    ``asked``: queries without position [R, H, dn], with it [R, H, D_r] and, of a layer that
    selects, index queries [R, Hi, Di] and head weights [R, Hi]. Of the last part: nothing.
    """

    replay: Callable[[], None]
    asked: Outputs


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """One bucket: its parts in order, hidden [R, D], and what the recordings must not outlive."""

    segments: tuple[_Segment, ...]
    hidden: Tensor
    geometry: Geometry
    rows: SegmentRows
    rotations: Rotations


class PrefillGraphs:
    """The graphs and their buffers (module docstring)."""

    def __init__(
        self,
        model: SparseMlaModel,
        pools: Mapping[str, PagedPool],
        ops: Operators,
        rules: GraphRules,
        recorder: Recorder,
    ) -> None:
        """``ops``: of what is captured. ``rules.buckets``: rows, ascending."""
        self.rules = rules
        self._model, self._pools, self._ops = model, pools, ops
        self._recorder = recorder
        most, config = rules.buckets[-1], model.config
        width = config.num_attention_heads * config.v_head_dim
        dtype = model.embedding.dtype
        attended = torch.zeros((most, width), dtype=dtype, device=rules.device)
        self.buffers = SegmentBuffers(rules.groups, most, attended, rules.device)
        self._captured: dict[int, _Captured] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers; what recordings allocate comes on top."""
        return self.buffers.num_bytes

    def bucket_of(self, num_rows: int) -> int | None:
        """The bucket that a step of so many rows runs in; None: it runs eagerly."""
        return segment_bucket(num_rows, self.rules.buckets)

    def takes(self, batch: Batch) -> bool:
        """Whether a step is for these graphs: it is no decode step, and a bucket fits."""
        is_decode = batch.plan.graph_key is not None
        return not is_decode and self.bucket_of(batch.geometry.rows.num_rows) is not None

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None]) -> None:
        """Record every bucket, the largest first: what it allocates suffices for the others."""
        buckets, before = self.rules.buckets, reserved_bytes(self.rules.device)
        for done, bucket in enumerate(reversed(buckets), start=1):
            self._captured[bucket] = self._record(bucket)
            progress("prefill graphs", done, len(buckets))
        logger.info(
            "captured prefill for %d sizes up to %d rows, %d graphs each: %.0f MiB and %.1f MiB "
            "of buffers",
            len(buckets),
            buckets[-1],
            len(self._model.layers) + 1,
            (reserved_bytes(self.rules.device) - before) / MIB,
            self.num_bytes / MIB,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, ops: Operators, bucket: int | None = None) -> ForwardOutput:
        """As SparseMlaModel.forward; `hidden` is a view that the next replay changes.

        ``ops``: of what is not captured. ``bucket``: None takes that of the rows. Waits for
        nothing. GeometryError for a bucket that was not captured.
        """
        rows = batch.geometry.rows
        bucket = self.bucket_of(rows.num_rows) if bucket is None else bucket
        captured = None if bucket is None else self._captured.get(bucket)
        if bucket is None or captured is None:
            raise GeometryError(
                f"no graph takes {rows.num_rows} rows; there are {sorted(self._captured)}"
            )
        self.buffers.refresh(batch, bucket)
        attended = self.buffers.attended(rows.num_rows)
        step = AttentionStep(batch.geometry, batch.plan, self._pools, ops)
        keys: KeySet | None = None
        faults: list[RowTensor] = []
        for number, layer in enumerate(self._model.layers):
            segment = captured.segments[number]
            segment.replay()
            ops.begin_layer(number)
            found = layer.attend(_live(segment.asked, step), keys, step)
            assert isinstance(found.data, Tensor)  # FP8 is for steps that decode
            attended.copy_(found.data)
            keys = found.keys
            faults += [found.nan_rows] if found.nan_rows is not None else []
        captured.segments[-1].replay()
        hidden = captured.hidden[: rows.num_rows]
        return ForwardOutput(RowTensor(rows, hidden), any_fault(step, faults))

    def _record(self, bucket: int) -> _Captured:
        """All parts of one bucket, in the order in which they will be replayed."""
        self.buffers.clear(bucket)
        rows = self.buffers.rows(bucket)
        geometry = segment_geometry(rows, self.rules.page_size)
        plan = plan_segments(geometry, self.rules.dims)
        step = AttentionStep(geometry, plan, self._pools, self._ops)
        rotations = self._model.rotations(step)
        segments: list[_Segment] = []
        x: Tensor | None = None
        for number in range(len(self._model.layers) + 1):
            work = (
                self._begin(rows, rotations, step)
                if x is None
                else self._go_on(number, x, rotations, step)
            )
            replay, outputs = self._recorder.record(work)
            replay()  # what the next part reads while it is recorded is finite
            *asked, x = outputs  # x is held until nobody records a reader of it any more
            segments.append(_Segment(replay, tuple(map(lent, asked))))
            del work, outputs, asked  # what is lent may be taken again from the next part on
        assert x is not None
        return _Captured(tuple(segments), lent(x), geometry, rows, rotations)

    def _begin(self, rows: SegmentRows, rotations: Rotations, step: AttentionStep) -> Work:
        """The first part: rotations and embeddings of the rows, then as the others end."""

        def work() -> Outputs:
            for kept, found in zip(
                rotations.tensors(), self._model.rotations(step).tensors(), strict=True
            ):
                kept.copy_(found)
            return self._enter(0, (self._model.embed(rows.token_ids), None), rotations, step)

        return work

    def _go_on(self, number: int, x: Tensor, rotations: Rotations, step: AttentionStep) -> Work:
        """Part ``number``: layer number - 1 from its attention on, the next one up to its own."""
        attended = self.buffers.attended(x.shape[0])

        def work() -> Outputs:
            stream = self._model.leave(number - 1, x, attended, step)
            if number == len(self._model.layers):
                return (self._model.finish(stream, step.ops),)
            return self._enter(number, stream, rotations, step)

        return work

    def _enter(
        self, number: int, stream: Stream, rotations: Rotations, step: AttentionStep
    ) -> Outputs:
        """What layer ``number`` asks of attention, and the stream."""
        x, queries = self._model.enter(number, stream, rotations, step)
        asked = [queries.query.nope.data, queries.query.rope.data]
        if queries.index is not None:
            asked += [queries.index.query.data, queries.index.weights.data]
        return (*asked, x)


def _live(asked: Outputs, step: AttentionStep) -> LayerQueries:
    """What a part left, of the live step's rows: on its axis, and on that of its SPARSE rows."""
    rows, sparse = step.geometry.rows, step.plan.sparse
    nope, rope, *index = (RowTensor(rows, data[: rows.num_rows]) for data in asked)
    query = Query(nope, rope)
    if not index or sparse is None:
        return LayerQueries(query, None)
    return LayerQueries(query, IndexQuery(*map(sparse.take, index)))
