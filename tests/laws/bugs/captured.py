"""Captured-style replay of a decode step: fixed buffers, a fixed plan, refreshed between replays.

In:  a Bench and the largest step of a bucket (its rows, requests and lengths are upper bounds).
Out: `CapturedStep`: `refresh(live)` copies a live step of the same bucket into the buffers that the
     captured AttentionStep reads, `replay()` runs that very step again. Nothing is planned, made or
     looked up on the host in between, as in a graph; addresses never change.
Not here: CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry, HostLengths, RowAxis, RowTensor, WriteSlots
from gnomon.attention.layouts import PagedPool
from gnomon.attention.plan import plan_step
from gnomon.attention.step import AttentionStep
from tests.laws.bugs.tiny import NEVER, Bench

AXIS_BUFFERS = ("request", "position", "kv_len")


def upper_bounds(geometry: Geometry) -> Geometry:
    """The same tensors; host lengths and spans are bounds from now on."""
    axes: dict[int, RowAxis] = {}

    def loose(axis: RowAxis) -> RowAxis:
        return axes.setdefault(
            id(axis), replace(axis, is_exact=False, label=f"captured {axis.label}")
        )

    host = geometry.requests.host
    requests = replace(geometry.requests, host=HostLengths(host.query_len, host.kv_len, False))
    writes = {
        group: WriteSlots(loose(w.axis), w.slots, w.local and loose(w.local))
        for group, w in geometry.writes.items()
    }
    return Geometry(requests, loose(geometry.rows), geometry.tables, writes)


class CapturedStep:
    """See the module docstring. ``pools``: the cache, where it is not the bench's own."""

    def __init__(
        self, bench: Bench, largest: Geometry, pools: Mapping[str, PagedPool] | None = None
    ) -> None:
        self.bench = bench
        geometry = upper_bounds(largest)
        plan = plan_step(geometry, bench.config.attention_dims(), policy=NEVER)
        self.step = AttentionStep(geometry, plan, pools or bench.pools, bench.ops)
        ids = torch.zeros(geometry.rows.num_rows, dtype=torch.int64)
        self.token_ids = RowTensor(geometry.rows, ids)

    def buffers(self, geometry: Geometry) -> list[Tensor]:
        """Everything that a replay reads, in a fixed order."""
        requests, writes = geometry.requests, geometry.writes["tokens"]
        found = [requests.query_len, requests.kv_len, geometry.tables["tokens"].pages, writes.slots]
        for axis in (geometry.rows, writes.axis):
            found += [getattr(axis, name) for name in AXIS_BUFFERS]
        return found

    def addresses(self) -> list[int]:
        """Where the buffers are."""
        held = [*self.buffers(self.step.geometry), self.token_ids.data]
        return [tensor.data_ptr() for tensor in held]

    def refresh(self, live: Geometry, token_ids: RowTensor) -> None:
        """Copy a live step of this bucket's rows; requests and pages that it lacks become 0."""
        for mine, new in zip(self.buffers(self.step.geometry), self.buffers(live), strict=True):
            assert mine.ndim == new.ndim
            mine.zero_()
            mine[tuple(slice(0, size) for size in new.shape)] = new
        assert live.rows.num_rows == self.step.geometry.rows.num_rows
        self.token_ids.data.copy_(token_ids.data)
        self.step.geometry.check()

    def replay(self, **parts: Any) -> Tensor:
        """Hidden rows [R, D] of the step that was refreshed."""
        return self.bench.model.forward(self.token_ids, replace(self.step, **parts)).hidden.data
