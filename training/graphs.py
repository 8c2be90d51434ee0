"""Training steps as CUDA graphs: one per shape of batch and kind of attention.

In:  a function of (is_sparse, ids [B, T], weight [B, T]) that only touches the device.
Out: its result, from a replay; the first steps of a kind run as they are (they compile and warm up
     what is then captured), and count as training steps like all others.
Why: a step is some 3,000 kernels of a few microseconds, and starting them one by one takes longer
     than running them. All graphs share one pool of memory: they run one after the other, and a
     result is used before the next one runs.
If a capture fails, the reason is printed and this kind of step goes on without a graph.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_STEPS = 4

Step = Callable[[bool, Tensor, Tensor], Tensor]
Kind = tuple[bool, int, int]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    ids: Tensor
    weight: Tensor
    result: Tensor


class StepGraphs:
    """Graphs by kind of step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._stream = torch.cuda.Stream()
        self._seen: dict[Kind, int] = {}
        self._captured: dict[Kind, _Captured | None] = {}
        self._pool = None

    def run(self, is_sparse: bool, ids: Tensor, weight: Tensor) -> Tensor:
        """One step on these tensors."""
        kind = (is_sparse, *ids.shape)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._run(kind, ids, weight)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _run(self, kind: Kind, ids: Tensor, weight: Tensor) -> Tensor:
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] > WARM_STEPS and kind not in self._captured:
            self._captured[kind] = self._capture(kind, ids, weight)
        captured = self._captured.get(kind)
        if captured is None:
            return self._step(kind[0], ids, weight)
        captured.ids.copy_(ids)
        captured.weight.copy_(weight)
        captured.graph.replay()
        return captured.result

    def _capture(self, kind: Kind, ids: Tensor, weight: Tensor) -> _Captured | None:
        static = ids.clone(), weight.clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = self._step(kind[0], *static)
        except RuntimeError:
            traceback.print_exc()
            torch.cuda.synchronize()
            return None
        self._pool = graph.pool()
        return _Captured(graph, *static, result)
