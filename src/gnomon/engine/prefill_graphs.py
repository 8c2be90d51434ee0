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
What passes from one to the next passes through SegmentBuffers, which outlive every graph; a graph's
own memory is read by itself alone.
Graph = eager is a law; tests replay the same work without CUDA by another `Recorder`.
Not here: which steps come here (runner.py), the head and sampling (runner.py, sampler.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gnomon.attention.geometry import RowTensor
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
from gnomon.engine.compile_ahead import compile_ahead
from gnomon.engine.graphs import MIB, GraphRules, Outputs, Recorder, Work, reserved_bytes
from gnomon.engine.segment_buffers import SegmentBuffers
from gnomon.errors import GeometryError
from gnomon.models.indexer import IndexQuery
from gnomon.models.layer_kinds import thinned
from gnomon.models.mla import Query
from gnomon.models.rotation import Rotations
from gnomon.models.sparse_mla_model import (
    DecoderLayer,
    ForwardOutput,
    LayerQueries,
    SparseMlaModel,
    Stream,
    any_fault,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """One bucket: how to replay its parts in order, and what the recordings must not outlive."""

    replays: tuple[Callable[[], None], ...]
    step: AttentionStep
    rows: SegmentRows
    rotations: Rotations


class RunOnce:
    """A Recorder that records nothing: the work is done, and that is all."""

    def record(self, work: Work) -> tuple[Callable[[], None], Outputs]:
        """(nothing, the outputs)."""
        return (lambda: None), work()


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
        most, dtype = rules.buckets[-1], model.embedding.dtype
        self.buffers = SegmentBuffers(rules.groups, most, model.config, dtype, rules.device)
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
        few = self.rehearsing(thinned(self._model))
        dry = [partial(few._record, bucket, RunOnce()) for bucket in reversed(buckets)]
        kernels = partial(progress, "kernels of prefill graphs", 1, 1)
        compile_ahead(self.rules.device, dry, kernels)
        for done, bucket in enumerate(reversed(buckets), start=1):
            self._captured[bucket] = self._record(bucket, self._recorder)
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

    def rehearsing(self, model: SparseMlaModel) -> PrefillGraphs:
        """The same over fewer layers, those of ``model``, whose steps skip what is captured.

        Between two attentions nothing runs then: what a step gives means nothing.
        """
        found = copy.copy(self)
        found._model = model
        idle: tuple[Callable[[], None], ...] = (lambda: None,) * (len(model.layers) + 1)
        found._captured = {
            bucket: replace(captured, replays=idle) for bucket, captured in self._captured.items()
        }
        return found

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
            captured.replays[number]()
            ops.begin_layer(number)
            asked = self.buffers.asked(rows.num_rows, _num_asked(layer))
            found = layer.attend(_live(asked, step), keys, step)
            assert isinstance(found.data, Tensor)  # FP8 is for steps that decode
            attended.copy_(found.data)
            keys = found.keys
            faults += [found.nan_rows] if found.nan_rows is not None else []
        captured.replays[-1]()
        hidden = self.buffers.stream(rows.num_rows)
        return ForwardOutput(RowTensor(rows, hidden), any_fault(step, faults))

    def _record(self, bucket: int, recorder: Recorder) -> _Captured:
        """All parts of one bucket, in the order in which they will be replayed."""
        self.buffers.clear(bucket)
        rows = self.buffers.rows(bucket)
        geometry = segment_geometry(rows, self.rules.page_size)
        plan = plan_segments(geometry, self.rules.dims)
        step = AttentionStep(geometry, plan, self._pools, self._ops)
        rotations = self._model.rotations(step)
        replays: list[Callable[[], None]] = []
        for number in range(len(self._model.layers) + 1):
            replay, _ = recorder.record(self._work(number, rows, rotations, step))
            replay()  # the next part reads numbers while it is recorded
            replays.append(replay)
        return _Captured(tuple(replays), step, rows, rotations)

    def _work(
        self, number: int, rows: SegmentRows, rotations: Rotations, step: AttentionStep
    ) -> Work:
        """Part ``number``: layer number - 1 from its attention on, layer ``number`` up to its own.

        The first one begins with rotations and embeddings, the last one ends with the norm.
        """
        model, bucket = self._model, rows.token_ids.shape[0]
        stream, attended = self.buffers.stream(bucket), self.buffers.attended(bucket)

        def work() -> Outputs:
            if number == 0:
                looked_up = model.rotations(step).tensors()
                for kept, found in zip(rotations.tensors(), looked_up, strict=True):
                    kept.copy_(found)
                behind: Stream = (model.embed(rows.token_ids), None)
            else:
                behind = model.leave(number - 1, stream, attended, step)
            if number == len(model.layers):
                stream.copy_(model.finish(behind, step.ops))
                return ()
            x, queries = model.enter(number, behind, rotations, step)
            stream.copy_(x)
            asked = self.buffers.asked(bucket, _num_asked(model.layers[number]))
            for kept, found in zip(asked, _asked(queries), strict=True):
                kept.copy_(found)
            return ()

        return work


def _num_asked(layer: DecoderLayer) -> int:
    """How many tensors a layer asks attention with."""
    return 2 if layer.indexer is None else 4


def _asked(queries: LayerQueries) -> Outputs:
    """The tensors, as SegmentBuffers.asked orders them."""
    asked = (queries.query.nope.data, queries.query.rope.data)
    if queries.index is None:
        return asked
    return (*asked, queries.index.query.data, queries.index.weights.data)


def _live(asked: Outputs, step: AttentionStep) -> LayerQueries:
    """The same of the live step: on its axis, and on that of its SPARSE rows."""
    rows, sparse = step.geometry.rows, step.plan.sparse
    nope, rope, *index = (RowTensor(rows, data) for data in asked)
    query = Query(nope, rope)
    if not index or sparse is None:
        return LayerQueries(query, None)
    return LayerQueries(query, IndexQuery(*map(sparse.take, index)))
