"""Index scores on a GPU: specs at tiny and real widths, layouts, FP8 dots, equal bits, graphs.

Oracle: the reference in float64, on the GPU. Tensor cores of Hopper align the FP8 products that
they add to the largest of them and keep about 14 bits: a score of codes may be off by 2^-11 of the
sum of its terms' sizes, Σ_h |w| Σ_d |q k|, which is the score of the absolute values.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.dispatch import OpNeed
from gnomon.attention.layouts import Fp8IndexKeyLayout, KVLayout, PlainLayout
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers import reference
from gnomon.attention.routes import AttentionDims
from gnomon.attention.spec import SPECS, Scale
from gnomon.attention.spec.draw import page_lists
from tests.gpu.cases_on_gpu import OnGpu, wrong_cases

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
REAL = Scale(
    num_rows=19,
    num_keys=700,
    page_size=64,
    dims=AttentionDims(
        num_heads=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_topk=64,
        index_num_heads=64,
        index_head_dim=128,
    ),
)
PLAIN, CODES = 1e-5, 2.0**-11


def index() -> Any:
    return importlib.import_module("gnomon.attention.providers.triton.index")


def provider() -> Any:
    return importlib.import_module("gnomon.attention.providers.triton").PROVIDER


@pytest.mark.parametrize("scale", [Scale(), REAL], ids=["tiny", "real"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["index_scores", "index_scores_paged"])
def test_every_case_of_the_specs(op: str, dtype: torch.dtype, scale: Scale) -> None:
    assert wrong_cases(SPECS[op], OnGpu(provider()), dtype, scale) == []


class Problem:
    """Rows with their own pages on the GPU, queries as the layout has them."""

    def __init__(self, layout: KVLayout, counts: list[int], heads: int, page_size: int) -> None:
        generator = torch.Generator("cuda").manual_seed(7)
        dtype, dim = layout.computed_dtype, layout.dim
        pages, num_pages = page_lists(torch.Generator().manual_seed(7), counts, page_size)
        self.pages = pages.cuda()
        self.pool = layout.allocate(num_pages, page_size, torch.device("cuda"))
        every = torch.arange(page_size, num_pages * page_size, device="cuda")
        keys = torch.randn(len(every), dim, generator=generator, device="cuda")
        layout.write(self.pool, every, keys.to(dtype))
        q = torch.randn(len(counts), heads, dim, generator=generator, device="cuda")
        self.q = layout.round_queries(q.to(dtype))
        self.weights = torch.randn(len(counts), heads, generator=generator, device="cuda")
        self.count = torch.tensor(counts, dtype=torch.int32, device="cuda")
        self.scale = (heads * dim) ** -0.5

    def paged(self) -> Tensor:
        found: Tensor = index().index_scores_paged(
            self.q, self.weights, self.pool, self.pages, self.count, self.scale
        )
        return found

    def paged_truth(self) -> tuple[Tensor, Tensor]:
        """Scores, and how far off they may be."""
        more = self.pool, self.pages, self.count, self.scale
        truth = reference.index_scores_paged(self.q.double(), self.weights.double(), *more)
        layout, pool = self.pool.layout, self.pool
        keys = layout.gather(pool, torch.arange(pool.num_slots, device="cuda"))
        sizes = PlainLayout(torch.float64, layout.dim).allocate(
            pool.num_pages, pool.page_size, torch.device("cuda")
        )
        sizes.typed().copy_(keys.abs())
        absolute = self.q.double().abs(), self.weights.double().abs()
        return truth, reference.index_scores_paged(*absolute, sizes, *more[1:])


def close(found: Tensor, truth: Tensor, sizes: Tensor, layout: KVLayout) -> None:
    """Within 1e-5 of plain scores; of codes, within the allowance for ``sizes`` of the terms."""
    off = (found.double() - truth.double()).abs().masked_fill(found == truth, 0.0)
    allowed = PLAIN + (CODES * sizes if layout.rounds_queries else 0.0)
    share = float((off / allowed).nan_to_num(torch.inf).max())
    assert share <= 1, f"off by {float(off.max()):.3g}, {share:.2f} of what is allowed"


def truth_of(q: Tensor, weights: Tensor, keys: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """Scores of keys side by side, and the sizes of their terms."""
    truth = reference.index_scores(q.double(), weights.double(), keys.double(), *more)
    absolute = (value.double().abs() for value in (q, weights, keys))
    return truth, reference.index_scores(*absolute, *more)


LAYOUTS = [
    PlainLayout(BF16, 128),
    PlainLayout(torch.float32, 128, BF16),
    Fp8IndexKeyLayout(128, BF16),
    Fp8IndexKeyLayout(32, torch.float32),
    Fp8IndexKeyLayout(36, BF16),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.id} {x.computed_dtype}")
@pytest.mark.parametrize(("heads", "page_size"), [(64, 64), (32, 64), (16, 16), (5, 4)])
def test_layouts(layout: KVLayout, heads: int, page_size: int) -> None:
    problem = Problem(layout, [3000, 0, 1, 129, 64, 2048], heads, page_size)
    close(problem.paged(), *problem.paged_truth(), layout)
    count = torch.tensor([2900, 700, 0, 1, 2560, 2999], dtype=torch.int32, device="cuda")
    keys = layout.gather_range(problem.pool, problem.pages[0], 0, 3000)
    scored = problem.q, problem.weights, keys, count, problem.scale
    truth, sizes = truth_of(*scored)
    for is_fixed in (False, True):
        need = OpNeed("cuda", index_layout=layout.id, is_deterministic=is_fixed)
        close(provider().kernel("index_scores", need)(*scored), truth, sizes, layout)
    seen = torch.arange(3000, device="cuda") < count[:, None]
    more = problem.pool, problem.pages[0], 3000, count, problem.scale
    lazy = index().lazy_scores(problem.q, problem.weights, *more)
    close(lazy[seen], truth[seen], sizes[seen], layout)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=lambda x: x.id)
@pytest.mark.parametrize("heads", [64, 32])
def test_fixed_bits(layout: KVLayout, heads: int) -> None:
    """Paged alone, paged in company, contiguous, in any chunk of rows: the same bits."""
    problem = Problem(layout, [1500, 1400, 31, 700], heads, 64)
    need = OpNeed("cuda", index_layout=layout.id, is_deterministic=True)
    kernel, paged = provider().kernel("index_scores", need), problem.paged()
    usual = provider().kernel("index_scores", OpNeed("cuda", index_layout=layout.id))
    for row, length in enumerate(problem.count.tolist()):
        keys = layout.gather_range(problem.pool, problem.pages[row], 0, length)
        alone = slice(row, row + 1)
        count = torch.full((4,), length, dtype=torch.int32, device="cuda")
        one = kernel(problem.q[alone], problem.weights[alone], keys, count[:1], problem.scale)
        many = kernel(problem.q, problem.weights, keys, count, problem.scale)
        assert torch.equal(one[0], paged[row, :length])
        assert torch.equal(many[row], paged[row, :length])
        usually = usual(problem.q, problem.weights, keys, count, problem.scale)
        assert torch.equal(usually[row], paged[row, :length]), "the usual tile has other bits"


def test_lazy_rows_in_a_graph() -> None:
    """Counts and requests are read on the device: one capture serves other counts."""
    problem = Problem(LAYOUTS[2], [5000, 3000, 100], 64, 64)
    request = torch.tensor([2, 0, -1, 1], dtype=torch.int32, device="cuda")
    count = torch.tensor([100, 5000, 0, 3000], dtype=torch.int32, device="cuda")
    take = torch.tensor([0, 1, 2, 0], device="cuda")
    q, weights = problem.q[take], problem.weights[take]
    rows = RowPages(problem.pages, request, 64)
    call = (q, weights, problem.pool, rows, count, problem.scale, (5056, 64))
    index().lazy_scores_paged(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = index().lazy_scores_paged(*call)
    for counts, owners in (
        ([100, 5000, 0, 3000], [2, 0, -1, 1]),
        ([70, 65, 64, 4000], [2, 1, 0, 0]),
    ):
        count.copy_(torch.tensor(counts, dtype=torch.int32))
        request.copy_(torch.tensor(owners, dtype=torch.int32))
        found.fill_(77.0)
        graph.replay()
        torch.cuda.synchronize()
        for row, length in enumerate(counts):
            if length > 64:
                keys = LAYOUTS[2].gather_range(problem.pool, problem.pages[owners[row]], 0, length)
                one = q[row, None], weights[row, None], keys, count[row, None], problem.scale
                close(found[row, None, :length], *truth_of(*one), LAYOUTS[2])
            else:
                assert (found[row] == 77.0).all()


def test_large_addresses() -> None:
    """Scores past 2^31 numbers, keys of a pool past 2^31 bytes."""
    layout = Fp8IndexKeyLayout(128, BF16)
    num_pages = 270_000
    pool = layout.allocate(num_pages, 64, torch.device("cuda"))
    far = torch.arange(num_pages - 4, num_pages, dtype=torch.int32, device="cuda")
    slots = (far.long()[:, None] * 64 + torch.arange(64, device="cuda")).flatten()
    layout.write(pool, slots, torch.randn(256, 128, device="cuda", dtype=BF16))
    q = layout.round_queries(torch.randn(3, 64, 128, device="cuda", dtype=BF16))
    weights = torch.randn(3, 64, device="cuda")
    count = torch.tensor([256, 200, 1], dtype=torch.int32, device="cuda")
    pages = far.expand(3, 4).contiguous()
    found = index().index_scores_paged(q, weights, pool, pages, count, 0.01)
    keys = layout.gather_range(pool, far, 0, 256)
    close(found, *truth_of(q, weights, keys, count, 0.01), layout)
    del pool
    many = torch.full((9000,), 300, dtype=torch.int32, device="cuda")
    q, weights = q[:1].expand(9000, -1, -1), weights[:1].expand(9000, -1)
    keys = torch.randn(250_000, 128, device="cuda", dtype=BF16)
    scores = index().index_scores_fixed(q, weights, keys, many, 0.01)
    assert torch.equal(scores[0, :300], scores[8999, :300])
    assert bool((scores[8999, 300:] == -torch.inf).all())
