"""Decode context parallelism simulated: latents striped over n ranks, results merged by lse.

In:  a Bench or single operators, a number of ranks, an interleave.
Out: `StripedOperators`: operators that stand for n ranks. Each rank has pools of its own and a page
     table with its KeyOwnership; it writes the latents that it owns, attends the ids that it owns,
     and the partial outputs are joined. Index keys stay whole on every rank.
     `merge_all` joins any number of partial results.
Not here: prefill context parallelism (ranks.py), processes, communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry, PageTable, RowTensor, WriteSlots
from gnomon.attention.indices import KeySet, ListSegment, owned_list
from gnomon.attention.layouts import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import AttentionOut
from gnomon.attention.ownership import KeyOwnership
from tests.laws.bugs.tiny import Bench

Partial = tuple[Tensor, Tensor]


def merge_all(ops: Operators, parts: Sequence[Partial]) -> Partial:
    """Join partial (out, lse) over disjoint keys, in order."""
    return reduce(ops.lse_merge, parts)


def stripe(table: PageTable, rank: int, size: int, interleave: int) -> PageTable:
    """A rank's page table: the same page numbers, on that rank's own pool."""
    return replace(table, ownership=KeyOwnership(rank, size, interleave))


class StripedOperators(Operators):
    """n ranks in one. ``bench.ops = StripedOperators(bench, n, interleave)``."""

    def __init__(self, bench: Bench, size: int, interleave: int = 1) -> None:
        super().__init__(bench.ops.kernels)
        self.size, self.interleave = size, interleave
        caches = [bench.new_pools() for _ in range(size)]
        self.pools: dict[int, list[PagedPool]] = {
            id(pool): [cache[part] for cache in caches]
            for part, pool in bench.pools.items()
            if part.endswith("latent")
        }
        self.geometry: Geometry | None = None  # of the step that runs; a test sets it

    def tables(self, table: PageTable) -> list[PageTable]:
        return [stripe(table, rank, self.size, self.interleave) for rank in range(self.size)]

    def latent_write(
        self,
        kv_raw: RowTensor,
        norm_weight: Tensor,
        eps: float,
        rope: Any,
        pool: PagedPool,
        writes: WriteSlots,
    ) -> None:
        """Every rank writes its own entries; the slots of the others are -1."""
        assert self.geometry is not None
        axis = writes.axis
        tables = self.tables(self.geometry.tables["tokens"])
        for table, own in zip(tables, self.pools[id(pool)], strict=True):
            slots = table.write_slots(axis.request, axis.position)
            super().latent_write(kv_raw, norm_weight, eps, rope, own, WriteSlots(axis, slots))

    def sparse_mla(
        self,
        q_latent: RowTensor,
        q_rope: RowTensor,
        pool: PagedPool,
        keys: KeySet,
        table: PageTable,
        scale: float,
    ) -> AttentionOut:
        """Every rank attends the ids that it owns; partial results are joined by their lse."""
        parts = []
        for own_table, own in zip(self.tables(table), self.pools[id(pool)], strict=True):
            assert own_table.ownership is not None
            segment = keys.segments[0]
            assert isinstance(segment, ListSegment)
            mine = KeySet(keys.axis, (owned_list(segment, own_table.ownership),))
            mine.check()
            part = super().sparse_mla(q_latent, q_rope, own, mine, own_table, scale)
            parts.append((part.out.data, part.lse.data))
        out, lse = merge_all(self, parts)
        return AttentionOut(RowTensor(keys.axis, out), RowTensor(keys.axis, lse))

    def context_gather(
        self, pool: PagedPool, table: PageTable, request: int, start: int, stop: int
    ) -> Tensor:
        """The owners' entries, in token order (what an all-gather of the stripes gives)."""
        position = torch.arange(start, stop)
        number = torch.full_like(position, request)
        parts = [
            own.layout.gather(own, own_table.slots(number, position))
            for own_table, own in zip(self.tables(table), self.pools[id(pool)], strict=True)
        ]
        return torch.stack(parts).sum(0)  # zeros where a rank holds nothing
