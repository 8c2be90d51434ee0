"""Chunks of context for the dense route: which keys are gathered and expanded together.

In:  the dense rows' axis (host spans only), dims, capabilities, budget, page size.
Out: chunks that cover every (row, visible key) pair of every dense row exactly once, those
     written in this step included: all keys are read back through the cache layout, so that both
     routes see the same numbers. In one chunk a row occurs at most once, hence at most one merge.
Not here: gathering, attention, the lse merge. A pure function; no tensors.

Requests are packed into a chunk until ``budget.context_rows`` keys are full; a request with more
keys is cut at page boundaries and its parts go to chunks of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gnomon.attention.axes import RowAxis, RowSpan
from gnomon.attention.plan_limits import Budget, Capabilities
from gnomon.attention.routes import AttentionDims
from gnomon.errors import ConfigError

__all__ = ["ContextChunk", "ContextGather", "ContextPiece", "context_bytes", "plan_context"]


class ContextGather(NamedTuple):
    """Keys start..stop-1 of ``request`` go to workspace rows offset..offset+stop-start-1."""

    request: int
    start: int
    stop: int
    offset: int


class ContextPiece(NamedTuple):
    """Rows row_start..row_stop-1, all of ``request``, attend its keys key_start..key_stop-1.

    The keys lie in the chunk's workspace from row ``key_offset`` on. A row sees the first
    clamp(kv_len - key_start, 0, key_stop - key_start) of them, possibly none.
    """

    request: int
    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    key_offset: int

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def num_keys(self) -> int:
        return self.key_stop - self.key_start


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """``num_keys`` keys gathered by ``gathers``, expanded once, attended by ``pieces``."""

    gathers: tuple[ContextGather, ...]
    pieces: tuple[ContextPiece, ...]

    @property
    def num_keys(self) -> int:
        return sum(gather.stop - gather.start for gather in self.gathers)


def context_bytes(chunk: ContextChunk, dims: AttentionDims, capabilities: Capabilities) -> int:
    """Bytes that a chunk holds at once, all fp32: latents, expanded keys and values, one piece's
    scores (if the provider holds them).
    """
    head = dims.qk_nope_head_dim + dims.qk_rope_head_dim + dims.v_head_dim
    key = dims.kv_lora_rank + dims.qk_rope_head_dim + dims.num_heads * head
    pairs = max((piece.num_rows * piece.num_keys for piece in chunk.pieces), default=0)
    held = pairs * dims.num_heads if capabilities.holds_dense_scores else 0
    return 4 * (chunk.num_keys * key + held)


def plan_context(
    axis: RowAxis,
    dims: AttentionDims,
    capabilities: Capabilities,
    budget: Budget,
    page_size: int,
) -> tuple[ContextChunk, ...]:
    """All chunks of the axis. Raises ConfigError if context_rows is less than a page."""
    if budget.context_rows < page_size:
        raise ConfigError(
            f"context_rows is {budget.context_rows}; at least a page, {page_size}, is needed, "
            "because context is cut at page boundaries"
        )
    most = budget.context_rows - budget.context_rows % page_size
    pairs = budget.score_bytes // (4 * dims.num_heads) if capabilities.holds_dense_scores else 0
    packer = _Packer(budget.context_rows, pairs)
    for spans in _blocks(axis):
        total = max(span.last_position + 1 for span in spans)
        if total <= budget.context_rows:
            packer.add(spans, 0, total)
            continue
        for start in range(0, total, most):
            packer.close()  # parts of one request never share a chunk: one merge a row at most
            packer.add(spans, start, min(start + most, total))
    packer.close()
    return tuple(packer.chunks)


def _blocks(axis: RowAxis) -> list[list[RowSpan]]:
    """Spans that lie row to row and belong to one request, together."""
    blocks: list[list[RowSpan]] = []
    for span in axis.spans:
        last = blocks[-1][-1] if blocks else None
        if last is not None and last.request == span.request and last.stop == span.start:
            blocks[-1].append(span)
        else:
            blocks.append([span])
    return blocks


class _Packer:
    """Fills one chunk after another; lives for one call of ``plan_context``."""

    def __init__(self, most_keys: int, most_pairs: int) -> None:
        self.most_keys, self.most_pairs = most_keys, most_pairs
        self.chunks: list[ContextChunk] = []
        self._gathers: list[ContextGather] = []
        self._pieces: list[ContextPiece] = []
        self._num_keys = 0

    def add(self, spans: list[RowSpan], start: int, stop: int) -> None:
        """Rows of ``spans`` against keys start..stop-1, in row blocks of at most most_pairs."""
        keys = stop - start
        if self._num_keys + keys > self.most_keys:
            self.close()
        request, row, end = spans[0].request, spans[0].start, spans[-1].stop
        if len(spans) == 1:  # positions ascend: the first rows may see none of these keys
            row += max(0, -(-(start - spans[0].position) // spans[0].stride))
        block = max(1, self.most_pairs // keys) if self.most_pairs else end - row
        self._gathers.append(ContextGather(request, start, stop, self._num_keys))
        self._pieces += [
            ContextPiece(request, first, min(first + block, end), start, stop, self._num_keys)
            for first in range(row, end, max(block, 1))
        ]
        self._num_keys += keys

    def close(self) -> None:
        """End the open chunk, if it holds anything."""
        if self._gathers:
            self.chunks.append(ContextChunk(tuple(self._gathers), tuple(self._pieces)))
        self._gathers, self._pieces, self._num_keys = [], [], 0
