"""Which rows of the step the rows of a kernel's call are.

In:  the step's geometry and plan, then every call of a layer in the order in which they happen.
Out: by group of rows (recording_calls.CallShape), int64 row numbers on the step's row axis; no
     entry where that cannot be told. Calls over chunks come in the order of the plan's chunks.
Not here: the calls themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.geometry import Geometry
from gnomon.attention.plan import PagedScoreChunk, ScoreChunk, StepPlan
from gnomon.attention.recording_calls import SHAPES
from gnomon.attention.row_tensor import RowSubset

OVER_STEP = frozenset({"rms_norm", "layer_norm", "moe"})


class RowPlaces:
    """Follows the calls of one step; ``begin_layer`` where the model begins a layer."""

    def __init__(self, geometry: Geometry, plan: StepPlan) -> None:
        every = torch.arange(geometry.rows.num_rows)
        self._every = every
        self._by_axis: dict[int, Tensor] = {id(geometry.rows): every}
        self._sparse = self._subset(plan.sparse)
        dense = self._subset(plan.dense)
        self._scored = [self._of_chunk(chunk) for chunk in plan.score_chunks]
        pieces = [piece for chunk in plan.context_chunks for piece in chunk.pieces]
        self._attended = [dense[piece.row_start : piece.row_stop] for piece in pieces]
        self._next = {"score": 0, "attend": 0}
        self._last = every

    def begin_layer(self) -> None:
        """The next call over chunks is over the first one again."""
        self._next = dict.fromkeys(self._next, 0)

    def of(self, op: str, arguments: tuple[Any, ...]) -> Mapping[str, Tensor]:
        """Rows of the step by group; a group whose length does not fit is left out."""
        found = self._find(op, arguments)
        lengths = {group: _length(arguments[at]) for at, group in SHAPES[op].rows.items()}
        return {
            group: rows
            for group, rows in found.items()
            if rows is not None and rows.shape[0] == lengths.get(group)
        }

    def _find(self, op: str, arguments: tuple[Any, ...]) -> dict[str, Tensor | None]:
        if op in OVER_STEP:
            return {"R": self._every}
        if op in ("rope", "latent_write"):
            return {"R": self._on(arguments[1 if op == "rope" else 3].axis)}
        if op == "index_prepare":
            return {"R": self._on(arguments[3][0].axis), "N": self._on(arguments[3][1].axis)}
        if op == "sparse_mla":
            return {"R": self._sparse}
        if op in ("index_scores", "index_scores_paged"):
            return {"R": self._advance("score", self._scored)}
        if op == "dense_mha":
            return {"R": self._advance("attend", self._attended)}
        return {"R": self._last} if op in ("topk", "lse_merge") else {}

    def _on(self, axis: RowAxis) -> Tensor | None:
        return self._by_axis.get(id(axis))

    def _advance(self, kind: str, chunks: list[Tensor]) -> Tensor | None:
        number = self._next[kind]
        self._next[kind] += 1
        if number >= len(chunks):
            return None
        self._last = chunks[number]
        return self._last

    def _subset(self, subset: RowSubset | None) -> Tensor:
        if subset is None:
            return self._every[:0]
        rows = self._every if subset.rows is None else subset.rows.cpu()
        self._by_axis[id(subset.axis)] = rows
        return rows

    def _of_chunk(self, chunk: ScoreChunk) -> Tensor:
        if isinstance(chunk, PagedScoreChunk):
            return self._sparse[torch.tensor(chunk.rows, dtype=torch.int64)]
        return self._sparse[chunk.row_start : chunk.row_stop]


def _length(value: Any) -> int:
    return int(value.shape[0]) if isinstance(value, Tensor) else int(value.cos.shape[0])
