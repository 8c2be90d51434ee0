"""Exact top-k under the interpreter: the spec, every path of the search, slots, short rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.ops.values import RowPages, TopK
from gnomon.attention.providers import reference
from gnomon.attention.providers.triton import topk
from gnomon.attention.spec import SPECS, Scale, check_provider

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
TINY = topk.Search(cap=64, sample=32, block=32, warps=4, programs=1)
WIDER = topk.Search(cap=64, sample=64, block=128, warps=4, programs=2)
SHARED = topk.Split(64, sample=32, part=32, part_warps=4, block=64, warps=4, programs=64, chunk=32)
FORMS = {"one program a row": TINY, "a row shared": SHARED}


def searched(
    scores: Tensor, count: Tensor, k: int, search: topk.Search | topk.Split = TINY
) -> TopK:
    out = topk._empty(scores.shape[0], k, True, scores.device)
    topk._launch(scores, count, k, out, None, search)
    return out


def agrees(found: TopK, scores: Tensor, count: Tensor, k: int) -> None:
    truth = reference.topk(scores, count, k, True)
    assert torch.equal(found.ids, truth.ids)
    assert torch.equal(found.count, truth.count)
    assert torch.equal(found.nan_rows, truth.nan_rows)
    assert found.margin is not None
    assert truth.margin is not None
    torch.testing.assert_close(found.margin, truth.margin, rtol=1e-6, atol=0)


def test_spec() -> None:
    spec, provider = SPECS["topk"], KernelSet("triton", 20, topk.KERNELS)
    for case in spec.cases(torch.Generator().manual_seed(0), torch.float32, Scale()):
        result = check_provider(spec, provider, case, torch.float32)
        assert result.is_ok, result


def rows_of_every_kind(num_columns: int) -> tuple[list[str], Tensor]:
    """Rows that a guess serves, that no guess can serve, and that fool it."""
    generator = torch.Generator().manual_seed(3)
    column = torch.arange(num_columns)
    noise = torch.randn(num_columns, generator=generator)
    few = torch.randint(-2, 3, (num_columns,), generator=generator).float()
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
    rows = {
        "noise": noise,
        "rising": column.float(),
        "falling": -column.float(),
        "five values": few,
        "all equal": torch.zeros(num_columns),
        "zeros of both signs": torch.where(column % 3 == 0, 0.0, -0.0),
        "all -inf": torch.full((num_columns,), -math.inf),
        "all NaN": torch.full((num_columns,), math.nan),
        "specials": special[torch.randint(0, 6, (num_columns,), generator=generator)],
        "the sample sees none of the best": torch.where(column % 8 == 7, 10 + noise, noise),
        "the sample sees the best alone": torch.where(column % 8 < 4, 10 + noise, noise),
        "a cliff": torch.where(column < 9, 1e30, -1e30),
        "neighbouring floats": (column % 97 + 0x3F800000).to(torch.int32).view(torch.float32),
        "tiny and huge": noise * torch.logspace(-38, 38, num_columns),
        "mostly zero": noise.clamp_min(0) * (noise > 1.5),
    }
    return list(rows), torch.stack(list(rows.values()))


@pytest.mark.parametrize("form", [WIDER, SHARED], ids=FORMS)
@pytest.mark.parametrize("k", [7, 63])
def test_every_path_of_the_search(k: int, form: topk.Search | topk.Split) -> None:
    _, scores = rows_of_every_kind(203)
    count = torch.full((len(scores),), 203, dtype=torch.int32)
    agrees(searched(scores, count, k, form), scores, count, k)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("k", [1, 32, 63])
def test_every_length_around_the_limits(k: int, form: topk.Search | topk.Split) -> None:
    """Lengths around k, the candidates kept, the blocks and the sample; columns behind are NaN."""
    lengths = [0, 1, k - 1, k, k + 1, 31, 32, 33, 63, 64, 65, 66, 95, 96, 97, 127, 128, 129, 160]
    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(len(lengths), 160, generator=generator)
    count = torch.tensor(lengths, dtype=torch.int32)
    behind = torch.arange(160) >= count[:, None]
    agrees(searched(scores.masked_fill(behind, math.nan), count, k, form), scores, count, k)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_row(form: topk.Search | topk.Split, data: Any) -> None:
    k = data.draw(st.integers(1, 63))
    length = data.draw(st.integers(0, 200))
    values = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, math.inf, -math.inf, math.nan, 3e38])
    wide = st.floats(width=32)
    numbers = data.draw(st.lists(values | wide, min_size=length, max_size=length))
    scores = torch.tensor([numbers + [5.0] * (200 - length)])
    count = torch.tensor([length], dtype=torch.int32)
    agrees(searched(scores, count, k, form), scores, count, k)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_shared_rows_of_few_values_and_any_lengths(data: Any) -> None:
    """Ties in numbers, rows of different lengths side by side, against a plain stable sort."""
    k, parts = data.draw(st.integers(1, 63)), data.draw(st.integers(1, 16))
    lengths = data.draw(st.lists(st.integers(0, 203), min_size=1, max_size=4))
    spread, seed = data.draw(st.sampled_from([1, 3, 30])), data.draw(st.integers(0, 9999))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(lengths), 203, generator=generator).mul(spread).round()
    form = replace(SHARED, programs=parts * len(lengths))
    found = searched(scores, torch.tensor(lengths, dtype=torch.int32), k, form)
    for row, length in enumerate(lengths):
        numbers = scores[row, :length].tolist()
        best = sorted(range(length), key=lambda column: -numbers[column])[:k]
        assert found.ids[row].tolist() == sorted(best) + [-1] * (k - len(best))


def test_a_row_of_many_parts() -> None:
    """47 parts; the best in a few of them, and tied."""
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(1500, generator=generator)
    column = torch.arange(1500)
    count = torch.tensor([1500], dtype=torch.int32)
    for scores in (torch.where(column // 90 == 11, 9 + noise, noise), (noise * 4).round()):
        agrees(searched(scores[None], count, 40, SHARED), scores[None], count, 40)


def test_a_row_of_just_k_above_one_value_that_all_others_have() -> None:
    """The K-th is not the tied one, and the margin tells how far it lies above."""
    scores = torch.ones(1, 203)
    scores[0, 3:203:30] = torch.arange(2.0, 9.0)  # 7 columns
    count = torch.tensor([203], dtype=torch.int32)
    found = searched(scores, count, 7, SHARED)
    assert found.ids[0].tolist() == list(range(3, 203, 30))
    assert found.margin is not None
    assert found.margin.tolist() == [1.0]


def test_the_usual_sizes_on_strided_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(3, 9000, generator=generator)[:, :8999]
    count = torch.tensor([8999, 5000, 2049], dtype=torch.int32)
    agrees(topk.topk(scores, count, 2048, True), scores, count, 2048)


@pytest.mark.parametrize("form", [None, SHARED], ids=["as chosen", "a row shared"])
def test_slots_of_the_rows_own_pages(
    form: topk.Split | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form is not None:
        monkeypatch.setattr(topk, "search_for", lambda *_: form)
    generator = torch.Generator().manual_seed(6)
    page_size, k = 5, 33
    pages = torch.randperm(80, generator=generator).view(2, 40).to(torch.int32)
    pages[0, 3] = 0  # a page that is not there
    request = torch.tensor([1, 0, -1, 1, 0], dtype=torch.int32)
    count = torch.tensor([200, 150, 0, 33, 7], dtype=torch.int32)
    scores = torch.randn(5, 200, generator=generator)
    rows = RowPages(pages, request, page_size)
    found = topk.topk_slots(scores, count, k, True, rows)
    agrees(found, scores, count, k)
    assert found.slots is not None
    assert found.slots.dtype == torch.int64
    for row in range(5):
        for position, slot in zip(found.ids[row].tolist(), found.slots[row].tolist(), strict=True):
            page = int(pages[request[row], position // page_size]) if position >= 0 else 0
            expected = page * page_size + position % page_size if page > 0 else -1
            assert slot == expected


def test_short_rows_are_listed_without_a_look_at_their_scores() -> None:
    """NaN in their scores raises nothing, and there may be no scores at all; written in place."""
    count = torch.tensor([3, 0, 7], dtype=torch.int32)
    rows = RowPages(torch.arange(1, 7, dtype=torch.int32).view(3, 2), None, 4)
    whole = topk.topk_slots(torch.full((3, 20), math.nan), count, 7, False, rows)
    held = topk.topk_slots(None, count, 7, False, rows)
    ids = torch.full((5, 7), 77, dtype=torch.int32)
    slots = torch.full((5, 7), 77, dtype=torch.int64)
    out = TopK(
        ids[1:4],
        torch.zeros(3, dtype=torch.int32),
        None,
        torch.ones(3, dtype=torch.bool),
        slots[1:4],
    )
    placed = topk.topk_slots(None, count, 7, False, rows, out)
    assert placed is out
    assert (ids[[0, 4]] == 77).all()
    assert (slots[[0, 4]] == 77).all()
    for found in (whole, held, placed):
        assert not found.nan_rows.any()
        assert found.margin is None
        expected = [list(range(n)) + [-1] * (7 - n) for n in count.tolist()]
        assert found.ids.tolist() == expected
        assert found.slots is not None
        slot = [[4 * (2 * r + 1) + i if i >= 0 else -1 for i in expected[r]] for r in range(3)]
        assert found.slots.tolist() == slot


@given(
    k=st.sampled_from([1, 64, 512, 2048, 4096]),
    most=st.tuples(st.integers(1, 20_000), st.integers(1, 1_000_000)),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_forms_name_a_shape_for_every_search(
    k: int, most: tuple[int, int], shares: tuple[float, float]
) -> None:
    """Whatever shape within the limits is asked for, its form was named; and they are few."""
    named = topk.forms(k, *most, 132)
    met = {topk.search_for(k, rows, columns, 132) for rows, columns in named}
    assert len(met) == len(named) <= 5
    rows = 1 + round(shares[0] * (most[0] - 1))
    columns = max(k, round(shares[1] * most[1]))
    assert topk.search_for(k, rows, columns, 132) in met
    assert all(r <= most[0] and c <= max(k, most[1]) for r, c in named)
