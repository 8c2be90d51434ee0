"""DecodeGraphs: a decode step captured once for each bucket of rows, replayed ever after.

In:  the model, its pools, operators that can be captured, sizes; then DecodeBatches.
Out: `capture`: all graphs, the largest first, out of one memory pool; `replay(batch)`: the logits
     and the flags of its rows, after one refresh of the buffers and one launch.
What is captured is the whole step: token ids, rotations, lists, layers, head, flags. Everything it
reads that can change lies in GraphBuffers; everything else that it names (geometry, plan, pools,
weights, outputs) is held here as long as the graphs are, so that no address can be given away.
Graph = eager is a law; tests replay the same work without CUDA by another `Recorder`.
Not here: which steps come here (batch.py, runner.py), sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gnomon.attention.decode_plan import decode_geometry, plan_decode
from gnomon.attention.geometry import Geometry, RowTensor
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import Budget, Capabilities, StepPlan
from gnomon.attention.routes import AttentionDims
from gnomon.attention.score_runs import plan_lists
from gnomon.attention.step import AttentionStep
from gnomon.engine.batch import DecodeBatch
from gnomon.engine.compile_ahead import compile_ahead
from gnomon.engine.graph_buffers import GraphBuffers
from gnomon.engine.step_checks import row_flags
from gnomon.errors import GeometryError
from gnomon.models.layer_kinds import thinned
from gnomon.models.sparse_mla_model import SparseMlaModel

logger = logging.getLogger(__name__)

MIB = 2**20
Outputs = tuple[Tensor, ...]  # of a decode step: logits [R, V] float32, flags bool [2, R]
Work = Callable[[], Outputs]


class Recorder(Protocol):
    """Turns work into something that can be replayed."""

    def record(self, work: Work) -> tuple[Callable[[], None], Outputs]:
        """(replay, outputs): each replay does the work again and leaves it in the same outputs."""


class CudaRecorder:
    """CUDA graphs that share one memory pool: their outputs hold until the next replay of any.

    What the first run of a work took stays cached for the next one; reserved_bytes gives it back.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> tuple[Callable[[], None], Outputs]:
        """Run the work once, so that whatever is lazy (kernels, libraries) is there; capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Not torch.cuda.graph(), which gives all cached memory back before each capture.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            finally:
                graph.capture_end()
        return graph.replay, outputs


@dataclass(frozen=True, slots=True)
class GraphRules:
    """Sizes of the captured steps. `buckets` ascend; no request has more than `max_len` tokens."""

    dims: AttentionDims
    buckets: tuple[int, ...]
    max_len: int
    page_size: int
    groups: tuple[str, ...]
    device: torch.device
    capabilities: Capabilities
    budget: Budget


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """One bucket: how to replay it, and all that the recording must not outlive."""

    replay: Callable[[], None]
    outputs: Outputs
    geometry: Geometry
    plan: StepPlan


class DecodeGraphs:
    """The graphs and their buffers (module docstring)."""

    def __init__(
        self,
        model: SparseMlaModel,
        pools: Mapping[str, PagedPool],
        ops: Operators,
        rules: GraphRules,
        recorder: Recorder,
    ) -> None:
        self.rules = rules
        self._model, self._pools, self._ops = model, pools, ops
        self._recorder = recorder
        max_pages = -(-rules.max_len // rules.page_size)
        self.buffers = GraphBuffers(rules.groups, rules.buckets[-1], max_pages, rules.device)
        # One for all buckets: outputs of a recording stay allocated as long as it does.
        vocab, most = model.config.vocab_size, rules.buckets[-1]
        self._logits = torch.empty((most, vocab), dtype=torch.float32, device=rules.device)
        self._captured: dict[int, _Captured] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of buffers and logits; what recordings allocate comes on top."""
        return self.buffers.num_bytes + self._logits.nbytes

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None]) -> None:
        """Record every bucket, the largest first: what it allocates suffices for the others."""
        rules = self.rules
        before = reserved_bytes(rules.device)
        planned: dict[int, tuple[Geometry, StepPlan]] = {}
        for bucket in reversed(rules.buckets):
            geometry = decode_geometry(self.buffers.rows(bucket), rules.page_size, rules.max_len)
            plan = plan_decode(geometry, rules.dims, rules.capabilities, rules.budget)
            planned[bucket] = geometry, plan
        thin = thinned(self._model)
        works = [self._work(*planned[bucket], thin) for bucket in planned]
        compile_ahead(rules.device, works, lambda: progress("kernels of graphs", 1, 1))
        for done, (bucket, (geometry, plan)) in enumerate(planned.items(), start=1):
            replay, outputs = self._recorder.record(self._work(geometry, plan, self._model))
            self._captured[bucket] = _Captured(replay, outputs, geometry, plan)
            progress("graphs", done, len(rules.buckets))
        taken = reserved_bytes(rules.device) - before
        logger.info(
            "captured decode for %d sizes up to %d rows: %.0f MiB and %.1f MiB of buffers",
            len(rules.buckets),
            rules.buckets[-1],
            taken / MIB,
            self.num_bytes / MIB,
        )

    @torch.inference_mode()
    def replay(self, batch: DecodeBatch) -> Outputs:
        """Logits [B, V] and flags [2, B] of the batch's rows: views that the next replay changes.

        Waits for nothing. GeometryError for a bucket that was not captured.
        """
        captured = self._captured.get(batch.bucket)
        if captured is None:
            raise GeometryError(
                f"no graph of {batch.bucket} rows; there are {sorted(self._captured)}"
            )
        self.buffers.refresh(batch, batch.feed)
        captured.replay()
        logits, flags = captured.outputs
        num_live = len(batch.request_ids)
        return logits[:num_live], flags[:, :num_live]

    def remember(self, token_ids: Tensor) -> None:
        """What a step is sampling, int64 [M] on the device: the next one may feed on it."""
        self.buffers.sampled[: token_ids.shape[0]].copy_(token_ids)

    def _work(self, geometry: Geometry, plan: StepPlan, model: SparseMlaModel) -> Work:
        def work() -> Outputs:
            lists = plan_lists(geometry.rows, plan.score_chunks, plan.index_width)
            step = AttentionStep(geometry, replace(plan, lists=lists), self._pools, self._ops)
            token_ids = self.buffers.token_ids(geometry.rows.num_rows)
            output = model.forward(RowTensor(geometry.rows, token_ids), step)
            hidden = output.hidden.data
            logits = model.logits(hidden, step.ops, self._logits[: hidden.shape[0]])
            return logits, row_flags(hidden, output.nan_rows.data)

        return work


def reserved_bytes(device: torch.device) -> int:
    """What torch needs of the device's memory: what is cached goes back first. 0 on a CPU."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() if device.type == "cuda" else 0
