"""A tiny model over n simulated context-parallel ranks, each with a cache of its own.

In:  a Bench, a number of ranks, a strategy. Out: `Ranks.step`: every rank takes its shard of the
     step, runs the real forward pass with a real all-gather, and the rows of all ranks come back
     by token, each computed exactly once. `assert_caches_equal` compares all ranks' caches.
Not here: decode context parallelism (keys striped over ranks; dcp.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry
from gnomon.attention.layouts import PagedPool
from gnomon.attention.taps import RecordingTap
from gnomon.attention.transforms import ShardStrategy, pad_rows, shard_rows
from gnomon.parallel.simulated import SimulatedRank, run_ranks
from tests.laws.bugs.tiny import Bench, Request, Token, rows_by_token, selections

Selections = dict[tuple[int, str], list[set[int]]]


@dataclass
class RankOutput:
    """What one rank computed: its rows, its geometry, its selections."""

    rows: dict[Token, Tensor]
    geometry: Geometry
    tap: RecordingTap


class Ranks:
    """n ranks that stand for one. ``logs``: each rank's collectives of the last step."""

    def __init__(
        self, bench: Bench, size: int, strategy: ShardStrategy = ShardStrategy.ROUND_ROBIN
    ) -> None:
        self.bench, self.size, self.strategy = bench, size, strategy
        self.caches = [bench.new_pools() for _ in range(size)]
        self.outputs: list[RankOutput] = []
        self.logs: list[list[Any]] = []

    def step(
        self, work: Sequence[tuple[Request, int]], pad_to: int = 0, **options: Any
    ) -> dict[Token, Tensor]:
        """Hidden rows of all ranks by token. ``pad_to``: least rows of each rank."""
        requests = [one for one, _ in work]

        def one_rank(rank: SimulatedRank) -> RankOutput:
            whole = self.bench.geometry(work)
            shard = shard_rows(whole, rank.rank, self.size, self.strategy)
            shard = pad_rows(shard, max(pad_to, shard.rows.num_rows))
            shard.check()
            tap = RecordingTap(wants_margin=False)
            output = self.bench.forward(
                shard,
                requests,
                pools=self.caches[rank.rank],
                all_gather=rank.all_gather,
                tap=tap,
                **options,
            )
            assert bool(output.hidden.data.isfinite().all())
            return RankOutput(rows_by_token(output.hidden, requests), shard, tap)

        self.outputs, ranks = run_ranks(self.size, one_rank)
        self.logs = [rank.log for rank in ranks]
        merged: dict[Token, Tensor] = {}
        for output in self.outputs:
            assert not merged.keys() & output.rows.keys(), "a token was computed by two ranks"
            merged |= output.rows
        for one, n in work:
            one.done += n
        assert len(merged) == sum(n for _, n in work)
        return dict(sorted(merged.items()))

    def selected(self) -> Selections:
        """Selections of the last step, of all ranks, at the rows that they computed."""
        found: Selections = {}
        for output in self.outputs:
            for (layer, name), rows in selections(output.tap).items():
                kept = found.setdefault((layer, name), [])
                kept += [set() for _ in range(len(rows) - len(kept))]
                for _, position in (token for token in output.rows if token[0] == name):
                    kept[position] = rows[position]
        return found


def assert_caches_equal(
    left: Mapping[str, PagedPool], right: Mapping[str, PagedPool], bound: float = 1e-12
) -> None:
    """Two caches hold the same numbers; a slot that nobody wrote holds zeros in both."""
    assert left.keys() == right.keys()
    for part, pool in left.items():
        slots = torch.arange(pool.num_slots)
        ours, theirs = (p.layout.gather(p, slots) for p in (pool, right[part]))
        assert torch.equal(ours == 0, theirs == 0), f"{part}: other slots were written"
        assert float((ours - theirs).abs().max()) <= bound, part
