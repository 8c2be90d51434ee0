"""Index scores on a GPU: specs at tiny and real widths, layouts, FP8 dots, equal bits, graphs.

Oracle: the reference in float64, on the GPU. FP8 tensor cores of Hopper keep about 14 bits of a
product's sum, so that scores of codes are compared with an allowance of 2e-4 of their own scale.
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
PLAIN, CODES = 1e-5, 2e-4


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

    def paged_truth(self) -> Tensor:
        wide = self.q.double(), self.weights.double()
        return reference.index_scores_paged(*wide, self.pool, self.pages, self.count, self.scale)


def close(found: Tensor, truth: Tensor, allowed: float) -> None:
    worst = (found.double() - truth.double()).abs()
    worst = worst.masked_fill(found == truth, 0.0)  # infinities
    assert float(worst.max()) <= allowed, f"off by {float(worst.max()):.3g}, {allowed} allowed"


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
    allowed = CODES if layout.rounds_queries else PLAIN
    close(problem.paged(), problem.paged_truth(), allowed)
    count = torch.tensor([2900, 700, 0, 1, 2560, 2999], dtype=torch.int32, device="cuda")
    keys = layout.gather_range(problem.pool, problem.pages[0], 0, 3000)
    scored = problem.q, problem.weights, keys, count, problem.scale
    truth = reference.index_scores(problem.q.double(), *scored[1:])
    for is_fixed in (False, True):
        need = OpNeed("cuda", index_layout=layout.id, is_deterministic=is_fixed)
        close(provider().kernel("index_scores", need)(*scored), truth, allowed)
    seen = torch.arange(3000, device="cuda") < count[:, None]
    lazy = index().lazy_scores(
        problem.q,
        problem.weights,
        problem.pool,
        problem.pages[0],
        3000,
        count,
        problem.scale,
    )
    close(lazy[seen], truth[seen], allowed)


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
        pages = problem.pages[request.clamp_min(0)]
        truth = reference.index_scores_paged(
            q.double(), weights, problem.pool, pages, count, problem.scale
        )
        for row, length in enumerate(counts):
            if length > 64:
                close(found[row, :length], truth[row, :length], CODES)
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
    truth = reference.index_scores_paged(q.double(), weights, pool, pages, count, 0.01)
    close(found, truth, CODES)
    del pool
    many = torch.full((9000,), 300, dtype=torch.int32, device="cuda")
    q, weights = q[:1].expand(9000, -1, -1), weights[:1].expand(9000, -1)
    keys = torch.randn(250_000, 128, device="cuda", dtype=BF16)
    scores = index().index_scores_fixed(q, weights, keys, many, 0.01)
    assert torch.equal(scores[0, :300], scores[8999, :300])
    assert bool((scores[8999, 300:] == -torch.inf).all())
