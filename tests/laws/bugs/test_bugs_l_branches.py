"""Cases L of reference/bugs.md: ranks that take different branches and so wait for each other.

Most need real ranks; what holds already is that a rank without work enters every collective.
"""

from __future__ import annotations

import threading

import pytest
import torch

from gnomon.errors import GeometryError
from gnomon.parallel.simulated import SimulatedRank, run_ranks
from tests.laws.bugs.ranks import Ranks
from tests.laws.bugs.tiny import Bench, token_list


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_l3_a_rank_without_work_enters_every_collective(kind: str) -> None:
    """Fewer rows than ranks: all ranks log the same (collective, shape, dtype)."""
    bench = Bench(kind)
    ranks = Ranks(bench, 4)
    one = bench.request("r", token_list(20))
    for n in (9, 1, 2, 1, 7):
        ranks.step([(one, n)])
        assert any(not output.rows for output in ranks.outputs) == (n < 4)
        assert all(log == ranks.logs[0] for log in ranks.logs)
        layers = bench.config.num_hidden_layers
        indexers = sum(bench.config.has_indexer(layer) for layer in range(layers))
        assert len(ranks.logs[0]) == layers + indexers  # latents of each, index keys where chosen


def test_l3_a_collective_inside_a_branch_is_seen() -> None:
    """The simulation itself: a rank that skips a collective, or brings another shape, is told."""

    def skips(rank: SimulatedRank) -> None:
        if rank.rank == 0:  # "has work"
            rank.all_gather(torch.zeros(2, 3))

    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, skips, timeout_s=0.2)

    def differs(rank: SimulatedRank) -> None:
        rank.all_gather(torch.zeros(2 + rank.rank, 3))

    with pytest.raises(GeometryError, match="same shape and dtype"):
        run_ranks(2, differs)
