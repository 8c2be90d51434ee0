"""Draft rows are ordinary rows; rejected ones become padding where they stand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.geometry import build_geometry
from gnomon.attention.transforms import advance, expand_drafts, gather_rows, select, shard_rows
from gnomon.errors import GeometryError
from tests.unit.attention.steps import Step, assert_same, geometry_of, steps, tokens_of, written


def _decodes(kv_lens: list[int], label: str = "step 12") -> Step:
    pages = [[3 * b + 1, 3 * b + 2, 3 * b + 3] for b in range(len(kv_lens))]
    step = Step([1] * len(kv_lens), kv_lens, pages, 8, pages)
    step.rows = list(step.tokens())
    step.writes = set(step.tokens())
    return step


def test_drafts_follow_their_request_and_rejected_rows_sit_in_the_middle() -> None:
    geometry = expand_drafts(geometry_of(_decodes([5, 9, 7])), 2)
    rows = [(0, 4), (0, 5), (0, 6), (1, 8), (1, 9), (1, 10), (2, 6), (2, 7), (2, 8)]
    assert tokens_of(geometry.rows) == rows
    assert geometry.requests.host.kv_len == (7, 11, 9)
    kept = [rows[0], None, None, *rows[3:6], rows[6], rows[7], None]
    exact = advance(geometry, [1, 3, 2])
    assert tokens_of(exact.rows) == kept
    assert exact.rows.num_live == 6
    assert exact.requests.host.kv_len == (5, 11, 8)
    device = advance(geometry, torch.tensor([1, 3, 2]))
    assert tokens_of(device.rows) == kept
    assert not device.rows.is_exact
    assert not device.requests.host.is_exact
    assert device.requests.kv_len.tolist() == [5, 11, 8]
    assert device.writes["tokens"].axis is device.rows
    assert device.writes["tokens"].slots.tolist() == exact.writes["tokens"].slots.tolist()


@given(steps(), st.data())
def test_drafts_of_any_step_equal_a_step_built_with_them(step: Step, data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 4)) if q else 0 for q in step.query_len]
    expanded = expand_drafts(geometry_of(step), counts)
    step.query_len = [q + k for q, k in zip(step.query_len, counts, strict=True)]
    step.kv_len = [n + k for n, k in zip(step.kv_len, counts, strict=True)]
    step.rows = list(step.tokens())
    step.writes = set(step.tokens())
    assert_same(expanded, step)
    fresh = geometry_of(step)
    assert expanded.rows.spans == fresh.rows.spans
    assert expanded.requests.host == fresh.requests.host
    assert torch.equal(expanded.writes["tokens"].slots, fresh.writes["tokens"].slots)


@given(steps(), st.integers(1, 4), st.data())
def test_ranks_advance_like_the_whole(step: Step, size: int, data: st.DataObject) -> None:
    """Rejection is by position, so a strided shard rejects the same tokens as the whole step."""
    whole = geometry_of(step)
    accepted = [data.draw(st.integers(0, q)) for q in step.query_len]
    on_host = data.draw(st.booleans())
    counts = accepted if on_host else torch.tensor(accepted, dtype=torch.int32)
    shards = [advance(shard_rows(whole, r, size), counts) for r in range(size)]
    after = advance(whole, counts)
    for shard in shards:
        shard.check(step.num_pages())
        assert written(shard, "tokens") == written(after, "tokens")
    live = {t for shard in shards for t in tokens_of(shard.rows) if t}
    assert live == {token for token in tokens_of(after.rows) if token}
    gathered = gather_rows([shard_rows(whole, r, size) for r in range(size)])
    assert {t for t in tokens_of(advance(gathered, counts).rows) if t} == live


def test_one_row_a_request_expands_even_where_the_host_knows_only_bounds() -> None:
    """Overlapped speculation: the next drafts are laid out before the host has read lengths."""
    geometry = advance(geometry_of(_decodes([5, 9])), torch.tensor([1, 0]))
    expanded = expand_drafts(geometry, 1)
    assert tokens_of(expanded.rows) == [(0, 4), (0, 5), None, None]
    with pytest.raises(GeometryError, match="does not know which row"):
        expand_drafts(advance(expanded, torch.tensor([1, 1])), 1)


def test_bad_calls_name_what_is_allowed() -> None:
    geometry = geometry_of(_decodes([5, 9]), "step 12")
    with pytest.raises(GeometryError, match="one count >= 0 each"):
        expand_drafts(geometry, [1])
    with pytest.raises(GeometryError, match="one count >= 0 each"):
        expand_drafts(geometry, [1, -1])
    with pytest.raises(GeometryError, match="holds 24 tokens, but a request has 25"):
        expand_drafts(geometry, 16)
    with pytest.raises(GeometryError, match="before select"):
        expand_drafts(select(geometry, [0]), 1)
    idle = build_geometry([1, 0], [5, 9], {"tokens": [[1], [2, 3]]}, 8)
    with pytest.raises(GeometryError, match="0 for a request without rows"):
        expand_drafts(idle, [1, 1])
    assert tokens_of(expand_drafts(idle, 1).rows) == [(0, 4), (0, 5)]
    with pytest.raises(GeometryError, match="between 0 and all of its rows"):
        advance(geometry, [2, 1])
    with pytest.raises(GeometryError, match="between 0 and all of its rows"):
        advance(geometry, [1])
    with pytest.raises(GeometryError, match=r"shape \(1,\) for 2 requests"):
        advance(geometry, torch.tensor([1]))
    with pytest.raises(GeometryError, match="upper bounds"):
        advance(advance(geometry, torch.tensor([1, 1])), [1, 1])
