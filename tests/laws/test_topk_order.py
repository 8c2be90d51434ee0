"""Law: top-k does not hang on chunking or on order; ties fall to the lower position.

The oracle is a sort in plain Python: by higher score, then by lower position; NaN counts as −inf.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.ops.values import TopK
from gnomon.attention.providers import torch as torch_provider

TOPK = torch_provider.PROVIDER.kernels["topk"]
# Few distinct values, so that most edges are tied; both zeros, both infinities, NaN.
VALUES = st.sampled_from(
    [-math.inf, -1.5, -1.0, -0.0, 0.0, 2.0**-149, 1.0, 2.0, math.inf, math.nan]
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    num_columns = draw(st.integers(1, 40))
    rows = draw(st.lists(st.lists(VALUES, min_size=1, max_size=num_columns), max_size=5))
    return [[*row] for row in rows], draw(st.integers(1, 24))


def padded(rows: list[list[float]], fill: float = -math.inf) -> tuple[torch.Tensor, torch.Tensor]:
    width = max((len(row) for row in rows), default=3)
    full = [row + [fill] * (width - len(row)) for row in rows]
    scores = torch.tensor(full, dtype=torch.float32).view(len(rows), width)
    return scores, torch.tensor([len(row) for row in rows], dtype=torch.int32)


def best(row: list[float], k: int) -> list[int]:
    clean = [-math.inf if math.isnan(value) else value for value in row]
    return sorted(sorted(range(len(row)), key=lambda column: (-clean[column], column))[:k])


def check(got: TopK, rows: list[list[float]], k: int) -> None:
    for index, row in enumerate(rows):
        expected = best(row, k)
        assert got.ids[index].tolist() == expected + [-1] * (k - len(expected))
        assert int(got.count[index]) == len(expected)
        assert bool(got.nan_rows[index]) == any(math.isnan(value) for value in row)
    assert got.ids.dtype == got.count.dtype == torch.int32
    assert got.ids.shape == (len(rows), k)


@given(tables())
def test_equals_a_sort(table: tuple[list[list[float]], int]) -> None:
    rows, k = table
    scores, count = padded(rows)
    before = scores.clone()
    check(TOPK(scores, count, k, True), rows, k)
    assert torch.equal(before.nan_to_num(9.0), scores.nan_to_num(9.0)), "scores were written"


@given(tables())
def test_margin_is_the_gap_at_the_edge(table: tuple[list[list[float]], int]) -> None:
    rows, k = table
    scores, count = padded(rows)
    margins = TOPK(scores, count, k, True).margin
    assert margins is not None
    for margin, row in zip(margins.tolist(), rows, strict=True):
        ranked = sorted((-math.inf if math.isnan(v) else v for v in row), reverse=True)
        if len(ranked) <= k:
            assert margin == math.inf
        elif ranked[k - 1] == ranked[k]:
            assert margin == 0.0
        else:
            assert margin == ranked[k - 1] - ranked[k]


@given(tables(), st.integers(1, 13))
def test_running_over_chunks_equals_one_piece(
    table: tuple[list[list[float]], int], chunk: int
) -> None:
    """Keep the best of what was seen, in order of position, and go on: as select.py does."""
    rows, k = table
    kept: list[list[int]] = [[] for _ in rows]
    width = max((len(row) for row in rows), default=0)
    for start in range(0, width, chunk):
        columns = [
            ids + list(range(start, min(start + chunk, len(row))))
            for ids, row in zip(kept, rows, strict=True)
        ]
        values = [[row[c] for c in ids] for ids, row in zip(columns, rows, strict=True)]
        got = TOPK(*padded(values), k, False)
        kept = [
            [ids[place] for place in places if place >= 0]
            for ids, places in zip(columns, got.ids.tolist(), strict=True)
        ]
    assert kept == [best(row, k) for row in rows]


@given(tables(), st.integers(0, 5))
def test_order_of_rows_does_not_matter(table: tuple[list[list[float]], int], seed: int) -> None:
    rows, k = table
    scores, count = padded(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    whole, turned = TOPK(scores, count, k), TOPK(scores[order], count[order], k)
    assert torch.equal(whole.ids[order], turned.ids)


@pytest.mark.parametrize("num_rows", [1, 63, 64, 128, 200])
def test_many_rows_of_a_prefill(num_rows: int) -> None:
    """Counts ascend as in a prefill, half of the rows are full of ties."""
    generator = torch.Generator().manual_seed(num_rows)
    num_keys, k = 150, 16
    counts = (torch.arange(num_rows) * (num_keys - 1) // max(1, num_rows - 1) + 1).tolist()
    scores = torch.randn(num_rows, num_keys, generator=generator)
    scores[::2] = scores[::2].round()
    rows = [row[:count] for row, count in zip(scores.tolist(), counts, strict=True)]
    check(TOPK(*padded(rows), k, False), rows, k)


def test_real_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 6000, generator=generator).mul_(8).round_()
    count = torch.tensor([6000, 2048, 2049, 4000], dtype=torch.int32)
    rows = [row[:n] for row, n in zip(scores.tolist(), count.tolist(), strict=True)]
    check(TOPK(*padded(rows), 2048, True), rows, 2048)
