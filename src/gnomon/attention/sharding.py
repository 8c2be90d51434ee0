"""Rows over ranks: context-parallel shards of a step, and the gathering of ranks' rows.

In:  a Geometry of the whole step (the same on every rank), or the Geometry of every rank.
Out: this rank's rows, with the writes of all ranks' rows in the order of an all-gather; or the
     rows of all ranks on one axis.
Not here: which rank holds a key (ownership.py), collectives (gnomon.parallel).

Work and ownership are separate maps. Shards are pure functions of host values, so that each rank
knows the rows of every other without asking. A rank may get no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.axes import HostLengths, RequestAxis, RowAxis, take_axis, take_rows
from gnomon.attention.geometry import Geometry, WriteSlots
from gnomon.errors import GeometryError

__all__ = ["ShardStrategy", "deal_rows", "gather_rows", "shard_rows"]


class ShardStrategy(StrEnum):
    """ROUND_ROBIN: live row i of the step goes to rank i % size. ZIGZAG: each request is cut into
    2 * size blocks, and rank r takes blocks r and 2 * size - 1 - r, which balances causal work.
    """

    ROUND_ROBIN = "round_robin"
    ZIGZAG = "zigzag"


def deal_rows(axis: RowAxis, size: int, strategy: ShardStrategy) -> list[np.ndarray]:
    """The live rows of each of ``size`` ranks, int64, in row order. Padding rows are dealt out."""
    live = axis.host_live_rows()
    if ShardStrategy(strategy) is ShardStrategy.ROUND_ROBIN:
        return [live[rank::size] for rank in range(size)]
    request, position = axis.host_rows()
    owner = request[live]
    hands: list[list[np.ndarray]] = [[] for _ in range(size)]
    blocks, first_extra = 2 * size, 0
    for b in np.unique(owner).tolist():
        rows = live[owner == b]
        rows = rows[np.argsort(position[rows], kind="stable")]
        each, extra = divmod(len(rows), blocks)
        # The blocks that take one row more go on where the last request's ended: balance.
        sizes = np.full(blocks, each, dtype=np.int64)
        sizes[(first_extra + np.arange(extra)) % blocks] += 1
        first_extra = (first_extra + extra) % blocks
        cuts = np.split(rows, np.cumsum(sizes)[:-1])
        for rank in range(size):
            hands[rank] += [cuts[rank], cuts[blocks - 1 - rank]]
    none = np.empty(0, dtype=np.int64)
    return [np.sort(np.concatenate([none, *hand])) for hand in hands]


def shard_rows(
    geometry: Geometry,
    rank: int,
    size: int,
    strategy: ShardStrategy = ShardStrategy.ROUND_ROBIN,
    rows_per_rank: int | None = None,
) -> Geometry:
    """This rank's rows of the step; every rank has ``rows_per_rank`` rows, padding last.

    By default that is the most that a rank gets. The writes are on the gathered axis (rank after
    rank, padding included), whose block ``rank`` is the new row axis. Requests and tables stay
    whole. Raises GeometryError for a bad rank, too few rows a rank, inexact live rows, or writes
    that are not those of the rows.
    """
    axis = geometry.rows
    _require_shardable(geometry, rank, size)
    hands = deal_rows(axis, size, strategy)
    most = max(len(hand) for hand in hands)
    each = most if rows_per_rank is None else rows_per_rank
    if each < most:
        raise GeometryError(
            f"shard_rows of '{axis.label}': {each} rows a rank, but a rank gets {most} of "
            f"{axis.num_live} live rows over {size} ranks"
        )
    source = np.full((size, each), -1, dtype=np.int64)
    for r, hand in enumerate(hands):
        source[r, : len(hand)] = hand
    label = f"{axis.label} > {ShardStrategy(strategy)} {rank}/{size}"
    local = take_axis(axis, source[rank], label)
    whole = take_axis(axis, source.reshape(-1), f"{label} > gather {size} ranks")
    whole = replace(whole, rank_rows=(each,) * size)
    index = torch.from_numpy(source.reshape(-1)).to(axis.device, non_blocking=True)
    writes = {
        group: WriteSlots(whole, take_rows(write.slots, index, -1), local)
        for group, write in geometry.writes.items()
    }
    return replace(geometry, rows=local, writes=writes)


def _require_shardable(geometry: Geometry, rank: int, size: int) -> None:
    axis = geometry.rows
    if not 0 <= rank < size:
        raise GeometryError(f"shard_rows of '{axis.label}': rank {rank} of {size} ranks")
    if not axis.is_exact:
        raise GeometryError(
            f"shard_rows of '{axis.label}': the host does not know which rows are live; "
            "give advance() the accepted counts on the host first"
        )
    for group, write in geometry.writes.items():
        if write.axis is not axis:
            raise GeometryError(
                f"shard_rows of '{axis.label}': group '{group}' writes the rows of "
                f"'{write.axis.label}'; shard the whole step, before select() and only once"
            )


def gather_rows(ranks: Sequence[Geometry]) -> Geometry:
    """All ranks' rows on one axis, rank after rank with each rank's padding; rank_rows says so.

    Geometries that share one RequestAxis are shards of one step: requests, tables and writes
    stay. Otherwise they are the steps of data-parallel ranks: requests are numbered through in
    rank order, and the result has neither tables nor writes, because a page number means
    something only on its own rank. ``select(gathered, token_order(gathered.rows))`` drops the
    padding and restores token order.
    """
    if not ranks:
        raise GeometryError("gather_rows of no rank; at least one geometry is needed")
    distinct = len({id(geometry.requests) for geometry in ranks})
    if distinct == 1:
        return _gather_shards(ranks)
    if distinct < len(ranks):
        raise GeometryError(
            f"gather_rows: {len(ranks)} ranks have {distinct} request axes; either all share one "
            "(shards of a step), or each has its own (data parallel)"
        )
    return _stack_steps(ranks)


def _gather_shards(ranks: Sequence[Geometry]) -> Geometry:
    first = ranks[0]
    rows = _concat_axes([geometry.rows for geometry in ranks], [0] * len(ranks))
    for write in first.writes.values():
        # The axis that the keys are written on has these very rows: stay on it.
        if write.axis.rank_rows == rows.rank_rows and all(
            np.array_equal(ours, theirs)
            for ours, theirs in zip(rows.host_rows(), write.axis.host_rows(), strict=True)
        ):
            rows = write.axis
            break
    writes = {group: WriteSlots(w.axis, w.slots) for group, w in first.writes.items()}
    return Geometry(first.requests, rows, first.tables, writes)


def _stack_steps(ranks: Sequence[Geometry]) -> Geometry:
    counts = [geometry.requests.num_requests for geometry in ranks]
    offsets = [sum(counts[:i]) for i in range(len(counts))]
    axes = [geometry.requests for geometry in ranks]
    host = HostLengths(
        tuple(q for axis in axes for q in axis.host.query_len),
        tuple(kv for axis in axes for kv in axis.host.kv_len),
        all(axis.host.is_exact for axis in axes),
    )
    requests = RequestAxis(
        torch.cat([axis.query_len for axis in axes]),
        torch.cat([axis.kv_len for axis in axes]),
        host,
    )
    return Geometry(requests, _concat_axes([g.rows for g in ranks], offsets), {}, {})


def _concat_axes(axes: Sequence[RowAxis], request_offsets: Sequence[int]) -> RowAxis:
    starts = [sum(axis.num_rows for axis in axes[:i]) for i in range(len(axes))]
    spans = tuple(
        span._replace(
            request=span.request + offset, start=span.start + start, stop=span.stop + start
        )
        for axis, offset, start in zip(axes, request_offsets, starts, strict=True)
        for span in axis.spans
    )

    def shifted(axis: RowAxis, offset: int) -> Tensor:
        return torch.where(axis.request >= 0, axis.request + offset, -1)

    return RowAxis(
        request=torch.cat([shifted(a, o) for a, o in zip(axes, request_offsets, strict=True)]),
        position=torch.cat([axis.position for axis in axes]),
        kv_len=torch.cat([axis.kv_len for axis in axes]),
        num_live=sum(axis.num_live for axis in axes),
        spans=spans,
        label=f"gather [{', '.join(axis.label for axis in axes)}]",
        is_exact=all(axis.is_exact for axis in axes),
        rank_rows=tuple(axis.num_rows for axis in axes),
    )
