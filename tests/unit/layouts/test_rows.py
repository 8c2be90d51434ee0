"""Moving rows by slot: the accelerator's way of skipping slots < 0 equals the host's."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.layouts.rows import put_rows, redirect_none, take_rows


@given(
    slots=st.lists(st.integers(2, 9), unique=True, max_size=5), num_none=st.integers(0, 4),
    seed=st.integers(0, 100), is_gapped=st.booleans(),
)  # fmt: skip
def test_redirected_writes_equal_dropped_ones(
    slots: list[int], num_none: int, seed: int, is_gapped: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(5, 2, 4 if is_gapped else 3, generator=draw)
    table = wide[..., :3]
    where = torch.tensor([*slots, *[-1] * num_none], dtype=torch.int64)
    where = where[torch.randperm(len(where), generator=draw)]
    rows = torch.randn(len(where), 3, generator=draw)
    expected = wide.clone()
    for slot, row in zip(where.tolist(), rows, strict=True):
        if slot >= 0:
            expected[slot // 2, slot % 2, :3] = row
    redirected = wide.clone()
    put_rows(redirected[..., :3], *redirect_none(table, where, rows))
    assert redirected.equal(expected)
    put_rows(table, where, rows)
    assert wide.equal(expected)
    read = take_rows(table, where)
    assert read.equal(rows.where((where >= 0)[:, None], 0.0))
