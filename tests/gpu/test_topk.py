"""Exact top-k on a GPU: the spec, real sizes against a stable sort, hostile rows, slots, graphs."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.ops.values import RowPages, TopK
from gnomon.attention.spec import SPECS, Scale
from tests.gpu.cases_on_gpu import OnGpu, wrong_cases

pytestmark = pytest.mark.gpu


def topk() -> Any:
    return importlib.import_module("gnomon.attention.providers.triton.topk")


def sorted_best(scores: Tensor, count: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, margin, NaN rows) by a stable descending sort of every row."""
    column = torch.arange(scores.shape[1], device=scores.device)
    seen = column < count[:, None]
    clean = scores.masked_fill(scores.isnan(), -torch.inf) + 0.0
    # Behind the count even -inf must lose: ranks are taken among the columns that are seen.
    values, order = clean.masked_fill(~seen, -torch.inf).sort(dim=1, descending=True, stable=True)
    is_seen = seen.gather(1, order)
    place = is_seen.cumsum(1) - 1
    chosen = is_seen & (place < k)
    big = torch.iinfo(torch.int32).max
    ids = torch.where(chosen, order, big).sort(1).values[:, :k]
    ids = torch.where(ids == big, -1, ids).to(torch.int32)
    cut = torch.where(is_seen & (place == k), values, -torch.inf).amax(1)
    last = torch.where(is_seen & (place == k - 1), values, -torch.inf).amax(1)
    margin = torch.where(last == cut, 0.0, last - cut).masked_fill(count <= k, torch.inf)
    return ids, margin, (scores.isnan() & seen).any(1)


def agrees(found: TopK, scores: Tensor, count: Tensor, k: int) -> None:
    ids, margin, nan_rows = sorted_best(scores, count, k)
    wrong = (found.ids != ids).any(1).nonzero()[:, 0].tolist()
    assert not wrong, f"{len(wrong)} rows have other ids, first {wrong[:5]}"
    assert torch.equal(found.count, count.clamp_max(k))
    assert torch.equal(found.nan_rows, nan_rows)
    assert found.margin is not None
    torch.testing.assert_close(found.margin, margin, rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [12, 64, 2048])
def test_every_case_of_the_spec(k: int) -> None:
    provider = importlib.import_module("gnomon.attention.providers.triton").PROVIDER
    dims = replace(Scale().dims, index_topk=k)
    scale = Scale(num_keys=max(70, 3 * k), dims=dims)
    assert wrong_cases(SPECS["topk"], OnGpu(provider), torch.float32, scale) == []


@pytest.mark.parametrize("k", [1, 63, 512, 1000, 1024, 2047, 2048])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (300, 9001),
        (300, 70_000),
        (5, 131_072),
        (3, 1 << 20),
        (1, 163_840),
        (16, 40_001),
        (70, 70_000),
    ],
)
def test_random_rows(rows: int, columns: int, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(k)
    scores = torch.randn(rows, columns, generator=generator, device="cuda")
    count = torch.randint(0, columns + 1, (rows,), generator=generator, device="cuda")
    count[:3] = torch.tensor([columns, k, k + 1][:rows])
    count = count.to(torch.int32)
    agrees(topk().topk(scores, count, k, True), scores, count, k)


def hostile_rows(columns: int) -> Tensor:
    """Ties, few values, specials, and rows that mislead a sample."""
    generator = torch.Generator("cuda").manual_seed(3)
    column = torch.arange(columns, device="cuda")
    noise = torch.randn(columns, generator=generator, device="cuda")
    pick = torch.randint(0, 6, (columns,), generator=generator, device="cuda")
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0], device="cuda")
    rows = [
        column.float(),
        -column.float(),
        pick.float(),
        torch.zeros_like(noise),
        torch.where(column % 3 == 0, 0.0, -0.0),
        torch.full_like(noise, -math.inf),
        torch.full_like(noise, math.nan),
        special[pick],
        torch.where(column % 64 >= 60, 10 + noise, noise),
        torch.where(column % 64 < 4, 10 + noise, noise),
        torch.where(column < 1000, 1e30, -1e30),
        torch.where(column > columns - 2500, noise + 50, noise),
        (column % 9973 + 0x3F800000).to(torch.int32).view(torch.float32),
        noise * torch.logspace(-38, 38, columns, device="cuda"),
        noise.clamp_min(0) * (noise > 2.5),
        noise.to(torch.bfloat16).float(),
        (noise * 8).round() / 8,
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("columns", [4097, 12_000, 65_536, 131_072])
@pytest.mark.parametrize("k", [64, 512, 2048])
@pytest.mark.parametrize("times", [1, 6, 20])
def test_hostile_rows(columns: int, k: int, times: int) -> None:
    """Few rows, of which each is shared by several programs, some, and many."""
    scores = hostile_rows(columns).repeat(times, 1)
    count = torch.full((len(scores),), columns, dtype=torch.int32, device="cuda")
    agrees(topk().topk(scores, count, k, True), scores, count, k)
    agrees(topk().topk(scores, count - 1, k, True), scores, count - 1, k)


@pytest.mark.parametrize("k", [512, 2048])
def test_every_length_near_the_limits(k: int) -> None:
    """Around k, the candidates kept, blocks and words (sglang#33835: sets that were not whole)."""
    near = [k, 2 * k, 4096, 8192, 16_384, 32_768, 65_536]
    lengths = sorted({n + d for n in near for d in (-33, -32, -31, -1, 0, 1, 31, 32, 33)})
    generator = torch.Generator("cuda").manual_seed(9)
    for num in (1, 6):
        count = torch.tensor(lengths * num, dtype=torch.int32, device="cuda")
        scores = torch.randn(len(count), max(lengths), generator=generator, device="cuda")
        agrees(topk().topk(scores, count, k, True), scores, count, k)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_short_rows_of_a_wide_table(rows: int) -> None:
    """As captured decode has them: as wide as the longest context, whatever the lengths."""
    generator = torch.Generator("cuda").manual_seed(rows)
    scores = torch.full((rows, 163_840), math.nan, device="cuda")
    for length in (0, 2048, 2049, 8191, 8192, 8193, 8200, 20_000, 163_839):
        scores[:, :length] = torch.randn(rows, length, generator=generator, device="cuda")
        count = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        agrees(topk().topk(scores, count, 2048, True), scores, count, 2048)


def test_one_result_in_any_company() -> None:
    """Rows alone, with some and with many others: three forms, one list."""
    generator = torch.Generator("cuda").manual_seed(8)
    scores = torch.randn(300, 50_000, generator=generator, device="cuda").mul(64).round()
    count = torch.full((300,), 49_999, dtype=torch.int32, device="cuda")
    whole = topk().topk(scores, count, 2048, True)
    for rows in (1, 16, 100):
        part = topk().topk(scores[:rows], count[:rows], 2048, True)
        assert torch.equal(part.ids, whole.ids[:rows])
        assert torch.equal(part.margin, whole.margin[:rows])


def test_slots_in_a_graph_and_twenty_equal_replays() -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    k, columns, page_size = 2048, 40_000, 64
    pages = torch.randperm(7 * 625, generator=generator, device="cuda").view(7, 625)
    pages = (pages + 1).to(torch.int32)
    request = torch.tensor([3, -1, 0, 6, 2, 1], dtype=torch.int32, device="cuda")
    scores = torch.randn(6, columns, generator=generator, device="cuda")
    count = torch.tensor([40_000, 0, 2048, 2049, 100, 30_001], dtype=torch.int32, device="cuda")
    rows = RowPages(pages, request, page_size)
    scores[4] = math.nan  # a short row is not looked at
    topk().topk_slots(scores, count, k, True, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = topk().topk_slots(scores, count, k, True, rows)
    for counts in ([40_000, 0, 2048, 2049, 100, 30_001], [3000, 2500, 39_000, 5, 0, 2049]):
        count.copy_(torch.tensor(counts, dtype=torch.int32))
        for _ in range(10):
            found.ids.zero_()
            graph.replay()
            clean = scores.nan_to_num(0.0)
            ids, margin, _ = sorted_best(clean, count, k)
            assert torch.equal(found.ids, ids)
            torch.testing.assert_close(found.margin, margin, rtol=1e-6, atol=0)
            assert not found.nan_rows.any()
            entry = ids.clamp_min(0).long()
            page = pages[request.clamp_min(0).long()[:, None], entry // page_size].long()
            slots = torch.where(ids >= 0, page * page_size + entry % page_size, -1)
            assert torch.equal(found.slots, slots)
