"""Chunks of index scores: which rows meet which keys at once, under a byte budget.

In:  the sparse rows' axis (host spans only), dims, capabilities, budget, page size.
Out: a tuple of chunks that covers every (row, visible key) pair of every row that needs scores
     exactly once; a row with kv_len <= index_topk needs none. Chunks of one row follow each
     other with ascending keys, so a running top-k is exact and ties fall to lower positions.
Not here: the scores, the top-k, the merge.

A contiguous chunk is a block of one request's rows against a range of its keys. A paged chunk
batches rows of several requests that have few rows each; rows in it see at least half of its
keys, so at most half of its work is padding (a row's own keys end at its kv_len).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gnomon.attention.axes import RowAxis, RowSpan
from gnomon.attention.plan_limits import Budget, Capabilities
from gnomon.attention.routes import AttentionDims
from gnomon.errors import ConfigError

__all__ = [
    "ContiguousScoreChunk",
    "PagedScoreChunk",
    "ScoreChunk",
    "plan_scores",
    "score_bytes",
]

FEWEST_ROWS = 16  # keys are chunked before a block of rows gets thinner than this


@dataclass(frozen=True, slots=True)
class ContiguousScoreChunk:
    """Rows row_start..row_stop-1, all of ``request``, against its keys key_start..key_stop-1.

    A row sees the keys below its kv_len only; a row may see none of a later key range.
    """

    request: int
    row_start: int
    row_stop: int
    key_start: int
    key_stop: int

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def num_keys(self) -> int:
        return self.key_stop - self.key_start


@dataclass(frozen=True, slots=True)
class PagedScoreChunk:
    """Each of ``rows`` (any requests) against keys key_start..key_stop-1 of its own request."""

    rows: tuple[int, ...]
    key_start: int
    key_stop: int

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def max_entries(self) -> int:
        """Width of the chunk's scores: the keys of its longest row."""
        return self.key_stop - self.key_start


ScoreChunk = ContiguousScoreChunk | PagedScoreChunk


def score_bytes(chunk: ScoreChunk, dims: AttentionDims, capabilities: Capabilities) -> int:
    """Bytes that a chunk holds at once, all fp32: summed scores, scores per head, gathered keys.

    Contiguous keys are gathered once a chunk, paged keys once a row (if the provider holds them).
    """
    score, shared, own = _widths(dims, capabilities)
    if isinstance(chunk, ContiguousScoreChunk):
        return 4 * chunk.num_keys * (chunk.num_rows * score + shared)
    return 4 * chunk.max_entries * chunk.num_rows * (score + own)


def _widths(dims: AttentionDims, capabilities: Capabilities) -> tuple[int, int, int]:
    """Floats of a (row, key) pair, of a contiguous key, and further ones of a paged pair."""
    score = 1 + (dims.index_num_heads if capabilities.holds_head_scores else 0)
    own = dims.index_head_dim if capabilities.holds_paged_keys else 0
    return score, dims.index_head_dim, own


def plan_scores(
    axis: RowAxis,
    dims: AttentionDims,
    capabilities: Capabilities,
    budget: Budget,
    page_size: int,
) -> tuple[ScoreChunk, ...]:
    """All chunks of the axis. Raises ConfigError if one row and one key pass the budget.

    Where the host knows upper bounds only, rows whose bound passes index_topk are scored; one
    that turns out shorter selects all of its keys all the same.
    """
    limit = _Limit(*_widths(dims, capabilities), budget.score_bytes // 4, page_size)
    chunks: list[ScoreChunk] = []
    few: list[tuple[int, int, RowSpan]] = []  # (-kv_len, row, its span)
    for span in axis.spans:
        # Positions ascend in a span: rows from the first with kv_len > K on need scores.
        skipped = max(0, -(-(dims.index_topk - span.position) // span.stride))
        start = span.start + skipped
        if span.stop - start > capabilities.max_paged_rows:
            chunks += _contiguous(span, start, span.stop, limit)
        else:
            few += [(-_kv_len(span, row), row, span) for row in range(start, span.stop)]
    few.sort()
    return tuple(chunks + _paged(few, limit))


class _Limit(NamedTuple):
    """The budget in floats, and what a pair or a key costs (``_widths``)."""

    score: int
    shared: int
    own: int
    floats: int
    page_size: int

    def most_keys(self, num_rows: int) -> int:
        """Keys that a contiguous chunk of ``num_rows`` can take: whole pages if it takes one."""
        keys = self.floats // (num_rows * self.score + self.shared)
        return keys if keys < self.page_size else keys - keys % self.page_size

    def most_rows(self, span: RowSpan, start: int, stop: int) -> int:
        """Rows from ``start`` on that can meet all of their keys in one chunk; 0 if none can."""
        low, high = 0, stop - start
        while low < high:
            rows = (low + high + 1) // 2
            keys = _kv_len(span, start + rows - 1)
            if keys * (rows * self.score + self.shared) <= self.floats:
                low = rows
            else:
                high = rows - 1
        return low


def _kv_len(span: RowSpan, row: int) -> int:
    return span.position + (row - span.start) * span.stride + 1


def _contiguous(span: RowSpan, start: int, stop: int, limit: _Limit) -> list[ScoreChunk]:
    chunks: list[ScoreChunk] = []
    while start < stop:
        fewest = min(FEWEST_ROWS, stop - start)
        rows = limit.most_rows(span, start, stop)
        total = keys = _kv_len(span, start + max(rows, fewest) - 1)
        if rows < fewest:
            rows = fewest
            while rows > 1 and limit.most_keys(rows) < limit.page_size:
                rows //= 2
            total, keys = _kv_len(span, start + rows - 1), limit.most_keys(rows)
        if keys < 1:
            raise ConfigError(
                f"score budget of {4 * limit.floats} bytes: one row and one key take "
                f"{4 * (limit.score + limit.shared)} bytes; raise Budget.score_bytes"
            )
        chunks += [
            ContiguousScoreChunk(span.request, start, start + rows, key, min(key + keys, total))
            for key in range(0, total, keys)
        ]
        start += rows
    return chunks


def _paged(few: list[tuple[int, int, RowSpan]], limit: _Limit) -> list[ScoreChunk]:
    """Group rows, longest first, while the shortest has half the keys and the budget holds."""
    chunks: list[ScoreChunk] = []
    first = 0
    while first < len(few):
        longest, _, span = -few[first][0], few[first][1], few[first][2]
        most = limit.floats // (longest * (limit.score + limit.own))
        stop = first + 1
        while stop < min(len(few), first + most) and -2 * few[stop][0] >= longest:
            stop += 1
        rows = tuple(sorted(row for _, row, _ in few[first:stop]))
        if most < 1 or (span.start <= rows[0] and rows[-1] < span.stop):
            chunks += _contiguous(span, rows[0], rows[-1] + 1, limit)
        else:
            chunks.append(PagedScoreChunk(rows, 0, longest))
        first = stop
    return chunks
