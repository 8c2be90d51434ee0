"""Fused selection gives the lists, margins and flags of the parts, and the slots of to_slots.

The fused kernels here are plain torch that keeps to the letter of the contract: what it leaves
undefined is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.attention.dispatch import KernelSet, OpNeed
from gnomon.attention.indices import ListSegment, to_slots
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import RowPages, Selection, TopK
from gnomon.attention.plan import Budget
from tests.unit.ops.build_step import DIMS, SmallStep, operators, small_step

PARTS = operators(is_deterministic=True)


def undefined_behind(scores: Tensor, count: Tensor, least: int = -1) -> Tensor:
    columns = torch.arange(scores.shape[1])
    return scores.masked_fill((columns >= count[:, None]) | (count <= least)[:, None], torch.nan)


def lazy_scores_paged(
    q: Tensor,
    weights: Tensor,
    pool: PagedPool,
    rows: RowPages,
    count: Tensor,
    scale: float,
    limits: tuple[int, int],
) -> Tensor:
    width, least = limits
    assert rows.request is not None
    pages = rows.pages[rows.request.clamp_min(0).long()][:, : -(-width // rows.page_size)]
    scores = PARTS.kernels["index_scores_paged"](q, weights, pool, pages, count, scale)
    return undefined_behind(scores[:, :width], count, least)


def lazy_scores(
    q: Tensor,
    weights: Tensor,
    pool: PagedPool,
    pages: Tensor,
    num_keys: int,
    count: Tensor,
    scale: float,
) -> Tensor:
    keys = PARTS.kernels["context_gather"](pool, pages, 0, num_keys)
    scores = PARTS.kernels["index_scores"](q, weights, keys, count, scale)
    return undefined_behind(scores, count)


def topk_slots(
    scores: Tensor | None,
    count: Tensor,
    k: int,
    want_margin: bool,
    rows: RowPages,
    out: TopK | None = None,
) -> TopK:
    columns = k if scores is None else scores.shape[1]
    given = torch.zeros(len(count), columns) if scores is None else scores
    hidden = (torch.arange(columns) >= count[:, None]) | (count <= k)[:, None]
    given = given.masked_fill(hidden, -torch.inf)
    short = torch.arange(columns) < torch.where(count <= k, count, 0)[:, None]
    best: TopK = PARTS.kernels["topk"](given.masked_fill(short, 0.0), count, k, want_margin)
    assert rows.request is not None
    entry, request = best.ids.clamp_min(0).long(), rows.request.clamp_min(0).long()
    page = rows.pages[request[:, None], entry // rows.page_size].long()
    held = (best.ids >= 0) & (page > 0)
    slots = torch.where(held, page * rows.page_size + entry % rows.page_size, -1)
    made = TopK(best.ids, best.count, best.margin, best.nan_rows, slots)
    if out is None:
        return made
    for name in ("ids", "count", "margin", "nan_rows", "slots"):
        target = getattr(out, name)
        if target is not None:
            target.copy_(getattr(made, name))
    return out


FUSIONS: dict[str, Any] = {
    "lazy_scores_paged": lazy_scores_paged,
    "lazy_scores": lazy_scores,
    "topk_slots": topk_slots,
}
FUSED = Operators(PARTS.kernels, PARTS.providers, FUSIONS)
TOPK_ALONE = Operators(PARTS.kernels, PARTS.providers, {"topk_slots": topk_slots})


def select(step: SmallStep, ops: Operators, want_margin: bool = True) -> Selection:
    return ops.index_select(
        step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan, want_margin
    )


def agree(step: SmallStep, ops: Operators) -> ListSegment:
    found, expected = select(step, ops), select(step, PARTS)
    segment, parts = found.keys.segments[0], expected.keys.segments[0]
    assert isinstance(segment, ListSegment)
    assert isinstance(parts, ListSegment)
    assert torch.equal(segment.ids, parts.ids)
    assert torch.equal(segment.count, parts.count)
    assert torch.equal(found.nan_rows, expected.nan_rows)
    assert found.margin is not None
    assert expected.margin is not None
    assert torch.equal(found.margin, expected.margin)
    assert segment.held is not None
    table = step.geometry.tables["tokens"]
    slots = to_slots(parts, found.keys.axis, table).ids
    assert segment.held.slots.dtype == torch.int32
    assert torch.equal(segment.held.slots.long(), slots)
    assert to_slots(segment, found.keys.axis, table).ids is segment.held.slots
    return segment


@st.composite
def lengths(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    kv = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    return [draw(st.integers(1, n)) for n in kv], kv


@settings(max_examples=40, deadline=None)
@given(lengths(), st.integers(0, 3), st.sampled_from([None, 230]))
def test_fused_lists_are_those_of_the_parts(
    both: tuple[list[int], list[int]], seed: int, num_rows: int | None
) -> None:
    """Prefill, decode, mixed, padded; rows that no run scores, runs of some rows, of all."""
    step = small_step(*both, seed=seed, num_rows=num_rows)
    for ops in (FUSED, TOPK_ALONE):
        agree(step, ops)


@pytest.mark.parametrize(
    ("query", "kv", "num_rows"),
    [([1], [3], None), ([1, 1, 1], [33, 4, 60], 16), ([13, 1, 20, 1], [50, 31, 20, 7], 40)],
)
def test_some_shapes(query: list[int], kv: list[int], num_rows: int | None) -> None:
    agree(small_step(query, kv, num_rows=num_rows), FUSED)


def test_keys_in_several_chunks_go_by_the_parts() -> None:
    step = small_step([20], [60], budget=Budget(score_bytes=4000))
    found, expected = select(step, FUSED), select(step, PARTS)
    segment, parts = found.keys.segments[0], expected.keys.segments[0]
    assert isinstance(segment, ListSegment)
    assert isinstance(parts, ListSegment)
    assert segment.held is None
    assert torch.equal(segment.ids, parts.ids)


def test_slots_serve_the_list_and_the_table_they_were_made_for_alone() -> None:
    step = small_step([2, 1], [40, 30])
    segment = agree(step, FUSED)
    axis, table = step.index_query.axis, step.geometry.tables["tokens"]
    assert segment.held is not None
    wrong = replace(segment.held, slots=segment.held.slots + 1)
    lying = replace(segment, held=wrong)
    right = to_slots(replace(segment, held=None), axis, table).ids
    assert torch.equal(to_slots(lying, axis, table).ids, wrong.slots)
    assert torch.equal(to_slots(lying, axis, table, validate=True).ids, right)
    assert torch.equal(to_slots(replace(lying, ids=segment.ids.clone()), axis, table).ids, right)
    other = replace(table, pages=table.pages.clone())
    assert torch.equal(to_slots(lying, axis, other).ids, right)


def test_attention_over_held_slots_is_the_same() -> None:
    step = small_step([9, 1], [40, 30])
    found, expected = select(step, FUSED), select(step, PARTS)
    table = step.geometry.tables["tokens"]
    outs = [
        PARTS.sparse_mla(step.q_latent, step.q_rope, step.latents, chosen.keys, table, 0.1)
        for chosen in (found, expected)
    ]
    assert torch.equal(outs[0].out.data, outs[1].out.data)


def test_deterministic_runs_take_the_fixed_form_of_a_fusion() -> None:
    provider = KernelSet("p", 1, {}, fixed={"lazy_scores": max}, fusions={"lazy_scores": min})
    assert provider.fusion("lazy_scores", OpNeed()) is min
    assert provider.fusion("lazy_scores", OpNeed(is_deterministic=True)) is max
    assert provider.fusion("topk_slots", OpNeed(is_deterministic=True)) is None
    assert DIMS.index_topk > 0
