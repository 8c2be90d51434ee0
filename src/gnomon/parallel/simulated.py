"""Ranks simulated in one process: a thread each, and collectives that meet at a barrier.

In:  a number of ranks and a function that each of them runs.
Out: what every rank returned. A collective checks that all ranks brought the same shape and dtype,
     and each rank's log names its collectives in order, so that a test can compare them: on real
     ranks another order, or one rank that stays away, is a hang.
Not here: torch.distributed, speed, memory of their own (ranks share the process).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from gnomon.errors import GeometryError

T = TypeVar("T")

TIMEOUT_S = 60.0
"""How long a rank waits for the others; longer means that one of them stays away."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective as a rank saw it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Group:
    """What the ranks share: a place for each rank's tensor, and the barrier around it."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.brought: list[Tensor | None] = [None] * size


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRank:
    """One rank's view of the group. ``log``: its collectives so far."""

    rank: int
    size: int
    group: _Group
    log: list[CollectiveCall] = field(default_factory=list)

    def all_gather(self, value: Tensor) -> Tensor:
        """[R, ...] of this rank -> [size * R, ...], rank after rank.

        Raises GeometryError on every rank if their shapes or dtypes differ, and
        threading.BrokenBarrierError if a rank stays away or has failed.
        """
        self.log.append(CollectiveCall("all_gather", tuple(value.shape), value.dtype))
        self.group.brought[self.rank] = value
        self.group.barrier.wait()
        brought = [part for part in self.group.brought if part is not None]
        self.group.barrier.wait()  # nobody brings the next tensor before all have taken these
        kinds = [(tuple(part.shape), part.dtype) for part in brought]
        if len(set(kinds)) > 1:
            raise GeometryError(
                f"all_gather of {self.size} ranks: they brought {kinds}; every rank has to bring "
                "the same shape and dtype: pad_rows() all shards alike"
            )
        return torch.cat(brought)


def run_ranks(
    size: int, work: Callable[[SimulatedRank], T], timeout_s: float = TIMEOUT_S
) -> tuple[list[T], list[SimulatedRank]]:
    """Run ``work`` once per rank, at the same time; (results, ranks with their logs) in order.

    Raises the exception of the first rank that failed by itself.
    """
    group = _Group(size, timeout_s)
    ranks = [SimulatedRank(rank, size, group) for rank in range(size)]
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def run(one: SimulatedRank) -> None:
        try:
            results[one.rank] = work(one)
        except BaseException as failure:  # raised again below, in the caller's thread
            failures[one.rank] = failure
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        own = [f for f in failures.values() if not isinstance(f, threading.BrokenBarrierError)]
        raise (own or list(failures.values()))[0]
    return [results[rank] for rank in range(size)], ranks
