"""Index scores under the interpreter: the spec's cases, layouts, tiles, laziness, equal bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnomon.attention.dispatch import KernelSet, OpNeed
from gnomon.attention.layouts import Fp8IndexKeyLayout, KVLayout, PlainLayout
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers import reference
from gnomon.attention.providers.triton import index, index_launch, index_views
from gnomon.attention.spec import SPECS, Scale, check_provider
from gnomon.attention.spec.draw import normal, page_lists

PROVIDER = KernelSet("triton", 20, index.KERNELS)
FIXED = KernelSet("triton fixed", 20, {**index.KERNELS, **index.FIXED})
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("provider", [PROVIDER, FIXED], ids=lambda p: p.name)
@pytest.mark.parametrize("op", ["index_scores", "index_scores_paged"])
def test_spec(op: str, provider: KernelSet, dtype: torch.dtype) -> None:
    spec = SPECS[op]
    for case in spec.cases(torch.Generator().manual_seed(0), dtype, Scale()):
        result = check_provider(spec, provider, case, dtype)
        assert result.is_ok, result


class Problem:
    """Rows with pages of their own over a pool of any layout, and the same keys side by side."""

    def __init__(self, layout: KVLayout, counts: list[int], heads: int, page_size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        dtype, dim = layout.computed_dtype, layout.dim
        self.pages, num_pages = page_lists(generator, counts, page_size)
        self.pool: PagedPool = layout.allocate(num_pages, page_size)
        every = torch.arange(page_size, num_pages * page_size)
        layout.write(self.pool, every, normal(generator, (len(every), dim), dtype))
        if isinstance(layout, PlainLayout):
            self.pool.typed()[:page_size] = torch.nan
        q = normal(generator, (len(counts), heads, dim), dtype)
        self.q = layout.round_queries(q)
        self.weights = normal(generator, (len(counts), heads), torch.float32)
        self.count = torch.tensor(counts, dtype=torch.int32)
        self.scale = (heads * dim) ** -0.5

    def keys(self, row: int, length: int) -> Tensor:
        return self.pool.layout.gather_range(self.pool, self.pages[row], 0, length)

    def truth(self) -> Tensor:
        wide = self.q.double(), self.weights.double()
        return reference.index_scores_paged(*wide, self.pool, self.pages, self.count, self.scale)

    def paged(self) -> Tensor:
        return index.index_scores_paged(
            self.q, self.weights, self.pool, self.pages, self.count, self.scale
        )


LAYOUTS = [
    PlainLayout(torch.bfloat16, 32),
    PlainLayout(torch.float32, 24),
    PlainLayout(torch.float32, 32, torch.bfloat16),
    PlainLayout(torch.bfloat16, 32, torch.float32),
    Fp8IndexKeyLayout(32, torch.bfloat16),
    Fp8IndexKeyLayout(32, torch.float32),
    Fp8IndexKeyLayout(36, torch.float16),
    Fp8IndexKeyLayout(128, torch.bfloat16),
]


def close(found: Tensor, truth: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), truth.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.id} {layout.computed_dtype}"
)
@pytest.mark.parametrize(("heads", "page_size"), [(16, 8), (5, 4), (64, 64)])
def test_paged_layouts(layout: KVLayout, heads: int, page_size: int) -> None:
    problem = Problem(layout, [300, 0, 1, 129, 64], heads, page_size)
    close(problem.paged(), problem.truth())


@pytest.mark.parametrize("layout", LAYOUTS[:1] + LAYOUTS[4:], ids=lambda layout: layout.id)
def test_one_request_scored_from_its_pages(layout: KVLayout) -> None:
    """lazy_scores on a prefix of the pages, index_scores on the same keys side by side."""
    problem = Problem(layout, [1200, 5, 9], 16, 16)
    count, num_keys = torch.tensor([1100, 700, 0], dtype=torch.int32), 1111
    keys = problem.keys(0, num_keys)
    scored = problem.q, problem.weights, keys, count, problem.scale
    truth = reference.index_scores(scored[0].double(), *scored[1:])
    seen = torch.arange(num_keys) < count[:, None]
    for kernel in (index.lazy_scores, index.lazy_scores_fixed):
        found = kernel(
            problem.q,
            problem.weights,
            problem.pool,
            problem.pages[0],
            num_keys,
            count,
            problem.scale,
        )
        assert found.shape == (3, num_keys)
        close(found[seen], truth[seen])
    for kernel in (index.index_scores, index.index_scores_codes, index.index_scores_codes_fixed):
        if layout.rounds_queries or kernel is index.index_scores:
            close(kernel(*scored), truth)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], ids=lambda layout: layout.id)
def test_lazy_rows_are_left_alone_up_to_their_list(layout: KVLayout) -> None:
    """Rows of two requests and padding through one page table; short rows are not scored."""
    problem = Problem(layout, [300, 40], 16, 16)
    request = torch.tensor([1, 0, -1, 0], dtype=torch.int32)
    count = torch.tensor([40, 300, 0, 257], dtype=torch.int32)
    take = torch.tensor([0, 1, 0, 1])
    q, weights = problem.q[take], problem.weights[take]
    rows = RowPages(problem.pages, request, 16)
    before = torch.full((4, 320), 77.0)
    torch.manual_seed(0)
    found = index.lazy_scores_paged(q, weights, problem.pool, rows, count, problem.scale, (320, 40))
    assert found.shape == before.shape
    pages = problem.pages[request.clamp_min(0)]
    truth = reference.index_scores_paged(
        q.double(), weights, problem.pool, pages, count, problem.scale
    )
    for row in (1, 3):
        close(found[row, : count[row]], truth[row, : count[row]])


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]], ids=lambda x: x.id)
def test_fixed_bits_are_the_same_paged_contiguous_and_in_other_company(layout: KVLayout) -> None:
    problem = Problem(layout, [300, 280, 31], 16, 16)
    paged = problem.paged()
    kernel = (
        index.VARIANTS["index_scores"](OpNeed(index_layout=layout.id, is_deterministic=True))
        or index.FIXED["index_scores"]
    )
    for row, length in enumerate(problem.count.tolist()):
        keys = problem.keys(row, length)
        alone = slice(row, row + 1)
        count = problem.count[alone]
        for rows in (alone, slice(None)):
            counts = count if rows is alone else torch.full((3,), length, dtype=torch.int32)
            found = kernel(problem.q[rows], problem.weights[rows], keys, counts, problem.scale)
            mine = found[0 if rows is alone else row]
            assert torch.equal(mine, paged[row, :length])


def test_bad_keys_show_in_their_own_score() -> None:
    """NaN and inf keys: what plain arithmetic gives, in that column alone."""
    generator = torch.Generator().manual_seed(1)
    q, weights = normal(generator, (3, 5, 24), torch.float32), torch.ones(3, 5)
    keys = normal(generator, (40, 24), torch.float32)
    keys[7, 3], keys[9, 0] = math.nan, math.inf
    count = torch.tensor([40, 8, 7], dtype=torch.int32)
    found = index.index_scores(q, weights, keys, count, 1.0)
    truth = reference.index_scores(q.double(), weights, keys, count, 1.0)
    assert found.isnan().nonzero().tolist() == [[0, 7], [1, 7]]
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_variants_follow_the_index_layout() -> None:
    choose = index.VARIANTS["index_scores"]
    assert choose(OpNeed(index_layout="bf16_128")) is None
    assert choose(OpNeed(index_layout="index_k_132")) is index.index_scores_codes
    fixed = OpNeed(index_layout="index_k_132", is_deterministic=True)
    assert choose(fixed) is index.index_scores_codes_fixed


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 64, 100, 128, 200, 256, 300, 512, 2000])
def test_paged_programs_fill_the_machine_in_few_rounds(num_rows: int) -> None:
    parts, resident = index_views.parts_of(num_rows, 528), 528
    rounds = math.ceil(num_rows * parts / resident)
    assert parts == 1 or rounds <= 4
    best = max(
        num_rows * p / (resident * math.ceil(num_rows * p / resident))
        for p in range(1, max(1, 4 * resident // num_rows) + 1)
    )
    assert num_rows * parts / (resident * rounds) >= best - 0.051


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[7]], ids=lambda x: x.id)
def test_only_rows_and_columns_asked_for_are_written(
    layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles hold more rows and keys than there are; one whole block is stored without masks."""
    problem = Problem(layout, [200, 200, 200], 16, 8)
    around = torch.full((12, 256), 77.0)
    monkeypatch.setattr(index_launch, "score_rows", lambda *_: around[:3, :200])
    keys = problem.keys(0, 200)
    kernel = index.index_scores_codes if layout.rounds_queries else index.index_scores
    found = kernel(problem.q, problem.weights, keys, problem.count, problem.scale)
    truth = reference.index_scores(
        problem.q.double(), problem.weights, keys, problem.count, problem.scale
    )
    close(found, truth)
    assert (around[3:] == 77.0).all()
    assert (around[:, 200:] == 77.0).all()
