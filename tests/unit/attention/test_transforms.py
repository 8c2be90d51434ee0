"""No chain of transformations changes what a real row is, what it sees, or what is written."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.geometry import Geometry
from gnomon.attention.transforms import (
    ShardStrategy,
    advance,
    expand_drafts,
    gather_rows,
    pad_rows,
    select,
    shard_rows,
    split,
)
from gnomon.errors import GeometryError
from tests.unit.attention.steps import (
    SPARE,
    Step,
    Token,
    assert_same,
    geometry_of,
    steps,
    tokens_of,
    written,
)


class Chain:
    """A geometry and the plain step beside it; each move is made on both."""

    def __init__(self, step: Step, data: st.DataObject) -> None:
        self.step = copy.deepcopy(step)
        self.geometry = geometry_of(step)
        self.data = data
        self.num_drafts = 0
        self.is_whole = True  # the write axis is the row axis
        self.is_exact = True

    def moves(self) -> list[str]:
        moves = ["pad", "select"]
        if self.is_whole:
            moves += ["split", "advance_on_device"]
        if self.is_whole and self.is_exact:
            moves += ["advance", "shard"]
        if self.is_whole and self.is_exact and self.num_drafts < SPARE - 3:
            moves += ["expand"]
        return moves

    def pad(self) -> None:
        extra = self.data.draw(st.integers(0, 40), label="padding rows")
        self.geometry = pad_rows(self.geometry, len(self.step.rows) + extra)
        self.step.rows += [None] * extra

    def select(self) -> None:
        order = self.data.draw(st.permutations(range(len(self.step.rows))), label="order")
        count = self.data.draw(st.integers(0, len(order)), label="selected")
        self.geometry = select(self.geometry, order[:count])
        self.step.rows = [self.step.rows[i] for i in order[:count]]
        self.is_whole = False

    def split(self) -> None:
        cuts = self.data.draw(
            st.lists(st.integers(0, len(self.step.rows)), max_size=3).map(sorted), label="cuts"
        )
        edges = [0, *cuts, len(self.step.rows)]
        counts = [b - a for a, b in pairwise(edges)]
        parts = split(self.geometry, counts)
        taken = self.data.draw(st.integers(0, len(parts) - 1), label="part")
        self.geometry = parts[taken]
        self.step.rows = self.step.rows[edges[taken] : edges[taken + 1]]
        self.step.writes = {token for token in self.step.rows if token is not None}

    def expand(self) -> None:
        counts = []
        for b in range(len(self.step.query_len)):
            has_rows = any(token is not None and token[0] == b for token in self.step.rows)
            # A part may hold a request's first rows only: then no drafts can follow them.
            complete = (b, self.step.kv_len[b] - 1) in self.step.rows
            most = 3 if has_rows and complete else 0
            counts.append(self.data.draw(st.integers(0, most), label="drafts"))
        rows: list[Token | None] = []
        for token in self.step.rows:
            rows.append(token)
            if token is not None and token[1] == self.step.kv_len[token[0]] - 1:
                b, p = token
                rows += [(b, p + j) for j in range(1, counts[b] + 1)]
        self.geometry = expand_drafts(self.geometry, counts)
        self.step.rows = rows
        self.step.writes = {token for token in rows if token is not None}
        self.step.query_len = [q + k for q, k in zip(self.step.query_len, counts, strict=True)]
        self.step.kv_len = [n + k for n, k in zip(self.step.kv_len, counts, strict=True)]
        self.num_drafts += max(counts, default=0)

    def _accepted(self) -> list[int]:
        return [self.data.draw(st.integers(0, q), label="accepted") for q in self.step.query_len]

    def _reject(self, accepted: list[int]) -> None:
        step = self.step
        step.kv_len = [
            n - q + a for n, q, a in zip(step.kv_len, step.query_len, accepted, strict=True)
        ]
        step.query_len = accepted
        step.rows = [t if t is not None and t[1] < step.kv_len[t[0]] else None for t in step.rows]
        step.writes = {t for t in step.writes if t[1] < step.kv_len[t[0]]}

    def advance(self) -> None:
        accepted = self._accepted()
        self.geometry = advance(self.geometry, accepted)
        self._reject(accepted)

    def advance_on_device(self) -> None:
        accepted = self._accepted()
        self.geometry = advance(self.geometry, torch.tensor(accepted, dtype=torch.int32))
        self._reject(accepted)
        self.is_exact = False

    def shard(self) -> None:
        size = self.data.draw(st.integers(1, 6), label="ranks")
        rank = self.data.draw(st.integers(0, size - 1), label="rank")
        live = [token for token in self.step.rows if token is not None]
        most = -(-len(live) // size)
        each = most + self.data.draw(st.integers(0, 20), label="padding a rank")
        self.geometry = shard_rows(self.geometry, rank, size, rows_per_rank=each)
        mine: list[Token | None] = list(live[rank::size])
        self.step.rows = mine + [None] * (each - len(mine))
        self.is_whole = False


@given(steps(), st.data())
def test_any_chain_keeps_every_real_row(step: Step, data: st.DataObject) -> None:
    chain = Chain(step, data)
    for _ in range(data.draw(st.integers(1, 5), label="moves")):
        getattr(chain, data.draw(st.sampled_from(chain.moves()), label="move"))()
    assert_same(chain.geometry, chain.step)
    assert chain.geometry.rows.is_exact == chain.is_exact


@given(steps(), st.integers(0, 300))
def test_padding_keeps_one_axis_for_rows_and_writes(step: Step, extra: int) -> None:
    geometry = geometry_of(step)
    padded = pad_rows(geometry, len(step.rows) + extra)
    for writes in padded.writes.values():
        assert writes.axis is padded.rows
        assert writes.slots[len(step.rows) :].tolist() == [-1] * extra
    assert padded.rows.num_live == len(step.rows)
    assert (padded is geometry) == (extra == 0)


@given(steps(), st.data())
def test_split_parts_are_the_whole(step: Step, data: st.DataObject) -> None:
    geometry = geometry_of(step)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(step.rows)), max_size=4)))
    edges = [0, *cuts, len(step.rows)]
    parts = split(geometry, [b - a for a, b in pairwise(edges)])
    assert [token for part in parts for token in tokens_of(part.rows)] == step.rows
    for group in ("tokens", "compressed"):
        together: dict[int, Token] = {}
        for part in parts:
            part.check(step.num_pages())
            mine = written(part, group)
            assert not together.keys() & mine.keys()
            together |= mine
        assert together == written(geometry, group)


@given(steps(), st.integers(1, 4), st.sampled_from(list(ShardStrategy)), st.data())
def test_every_rank_pads_and_splits_alike(
    step: Step, size: int, strategy: ShardStrategy, data: st.DataObject
) -> None:
    """Padding, then splitting, a shard keeps its gathered write axis in step with all ranks."""
    whole = geometry_of(step)
    shards = [shard_rows(whole, rank, size, strategy) for rank in range(size)]
    num_rows = shards[0].rows.num_rows + data.draw(st.integers(0, 9))
    shards = [pad_rows(shard, num_rows) for shard in shards]
    cut = data.draw(st.integers(0, num_rows))
    halves: list[list[Geometry]] = [[], []]
    for shard in shards:
        for i, part in enumerate(split(shard, [cut, num_rows - cut])):
            halves[i].append(part)
    together: dict[int, Token] = {}
    for ranks in halves:
        gathered = gather_rows(ranks)
        assert gathered.rows is ranks[0].writes["tokens"].axis
        gathered.check(step.num_pages())
        expected = [token for part in ranks for token in tokens_of(part.rows)]
        for part in ranks:
            assert tokens_of(part.writes["tokens"].axis) == expected
            assert part.writes["tokens"].axis is part.writes["compressed"].axis
            assert written(part, "tokens") == written(ranks[0], "tokens")
        together |= written(ranks[0], "tokens")
    assert together == written(whole, "tokens")


def test_labels_tell_the_history() -> None:
    step = Step([3, 4], [3, 9], [[1], [2, 3, 4]], 4, [[1], [2, 3]])
    geometry = pad_rows(select(geometry_of(step, "step 12"), [1, 3, 4]), 20)
    assert geometry.rows.label == "step 12 > select 3 of 7 > pad 20"


def test_bad_calls_name_what_is_allowed() -> None:
    step = Step([3, 4], [3, 9], [[1], [2, 3, 4]], 4, [[1], [2, 3]])
    geometry = geometry_of(step, "step 12")
    with pytest.raises(GeometryError, match=r"pad_rows\(6\) of 'step 12', which has 7 rows"):
        pad_rows(geometry, 6)
    with pytest.raises(GeometryError, match=r"rows -1\.\.2; allowed are 0\.\.6"):
        select(geometry, [2, -1])
    with pytest.raises(GeometryError, match=r"rows 7\.\.7"):
        select(geometry, np.array([7]))
    with pytest.raises(GeometryError, match="named twice"):
        select(geometry, [2, 3, 2])
    with pytest.raises(GeometryError, match="they add up to 6, the axis has 7"):
        split(geometry, [2, 4])
    with pytest.raises(GeometryError, match="they add up to 7"):
        split(geometry, [8, -1])
    with pytest.raises(GeometryError, match="split before selecting"):
        split(select(geometry, [0, 1]), [1, 1])
