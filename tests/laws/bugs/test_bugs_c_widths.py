"""Cases C of reference/bugs.md: integer widths and launch limits, very long contexts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gnomon.attention.geometry import build_geometry
from gnomon.attention.layouts import KVLayout, PagedPool
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.plan import Budget, Capabilities, plan_step
from gnomon.attention.routes import AttentionDims
from gnomon.attention.score_chunks import score_bytes
from tests.laws.bugs.op_cases import PROVIDERS, operators, plain_attention
from tests.laws.bugs.tiny import NEVER, Bench, assert_same_rows, token_list

PAGES = (1, 2047, 2048, 5000)  # the first ids of the report, past the null page


def far_pool(layout: KVLayout, num_pages: int, page_size: int, stride: int) -> PagedPool:
    """A pool whose pages lie ``stride`` bytes apart; untouched bytes take no memory."""
    need = layout.page_bytes(page_size)
    buffer = torch.from_numpy(np.zeros((num_pages - 1) * stride + need, dtype=np.uint8))
    return PagedPool(layout, buffer.as_strided((num_pages, need), (stride, 1)), page_size)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("layout", [PlainLayout(torch.float32, 32), Fp8IndexKeyLayout(32)], ids=str)
def test_c1_equal_pages_score_alike_wherever_they_lie(layout: KVLayout, provider: str) -> None:
    """Page ids 1, 2047, 2048, 5000 at a stride of 2^20 bytes: the last lies past 2^32."""
    pool = far_pool(layout, 5001, 4, 1 << 20)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4, 32, generator=generator)
    for page in PAGES:
        layout.write(pool, torch.arange(4) + page * 4, keys)
    q = torch.randn(1, 8, 32, generator=generator).expand(len(PAGES), -1, -1)
    pages = torch.tensor(PAGES, dtype=torch.int32)[:, None]
    count = torch.full((len(PAGES),), 4, dtype=torch.int32)
    scores = operators(provider).kernels["index_scores_paged"](
        q.contiguous(), torch.ones(len(PAGES), 8), pool, pages, count, 1.0
    )
    assert bool((scores[0] != 0).any())
    assert all(torch.equal(scores[0], row) for row in scores)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "layout", [PlainLayout(torch.bfloat16, 576), Fp8LatentLayout(512, 64)], ids=["bf16", "656"]
)
def test_c2_page_offsets_past_two_and_four_gib(layout: KVLayout, provider: str) -> None:
    """The report's stride of 1,435,968 bytes and its page 4564, at 6.5 GB: finite, and equal."""
    stride = 1_435_968
    assert 1495 * stride < 2**31 < 1496 * stride < 2990 * stride < 2**32 < 2991 * stride
    layout = layout.computing_in(torch.float64)
    pool = far_pool(layout, 4565, 4, stride)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(16, 576, generator=generator)
    pages = torch.tensor([1, 1496, 2991, 4564])
    slots = (pages[:, None] * 4 + torch.arange(4)).flatten()
    layout.write(pool, slots, values)
    near = far_pool(layout, 5, 4, layout.page_bytes(4))
    layout.write(near, torch.arange(16) + 4, values)
    q = torch.randn(1, 2, 576, generator=generator, dtype=torch.float64)
    kernel, count = operators(provider).kernels["sparse_mla"], torch.tensor([16], dtype=torch.int32)
    results = [
        kernel(q[..., :512], q[..., 512:], where, ids[None], count, 0.05)
        for where, ids in ((pool, slots), (near, torch.arange(16) + 4))
    ]
    assert bool(results[0][0].isfinite().all())
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(layout.gather_range(pool, pages, 5, 9), layout.gather(pool, slots[5:14]))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_c3_the_table_is_exactly_as_wide_as_the_pages(page_size: int, provider: str) -> None:
    """Length 65: a token's position is never the table's column, for any page size."""
    length, ops = 65, operators(provider)
    layout, num_pages = PlainLayout(torch.float64, 16), -(-length // page_size)
    pool = layout.allocate(num_pages + 1, page_size)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)) + 1
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(length, 16, generator=generator, dtype=torch.float64)
    position = torch.arange(length)
    layout.write(pool, pages[position // page_size] * page_size + position % page_size, keys)
    q = torch.randn(1, 3, 16, generator=generator, dtype=torch.float64)
    weights = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    count = torch.tensor([length], dtype=torch.int32)
    scores = ops.kernels["index_scores_paged"](q, weights, pool, pages[None].int(), count, 1.0)
    expected = (weights[0][:, None] * (q[0] @ keys.T).clamp_min(0)).sum(0)
    assert torch.allclose(scores[0, :length], expected, atol=1e-12)
    assert bool((scores[0, length:] == -torch.inf).all())


@pytest.mark.parametrize("num_entries", [65_535, 65_536, 70_000])
def test_c4_more_entries_than_a_grid_axis_holds(num_entries: int) -> None:
    """The report's launch grid ended at 65,535 pools."""
    k, kernels = 8, operators("torch").kernels
    keys = torch.zeros(num_entries, 4)
    keys[:, 0] = torch.randn(num_entries, generator=torch.Generator().manual_seed(num_entries))
    best = sorted({3, 65_534, num_entries - 1})
    keys[best, 0] = torch.tensor([50.0, 60.0, 70.0])[: len(best)]
    q = torch.tensor([[[1.0, 0, 0, 0]]])
    count = torch.tensor([num_entries], dtype=torch.int32)
    scores = kernels["index_scores"](q, torch.ones(1, 1), keys, count, 1.0)
    got = kernels["topk"](scores, count, k)
    order = keys[:, 0].clamp_min(0).sort(descending=True, stable=True).indices[:k]
    assert got.ids[0].tolist() == sorted(order.tolist())
    assert set(best) <= set(got.ids[0].tolist())


@pytest.mark.parametrize("num_keys", [131_071, 131_073, 147_456])
def test_c5_contexts_past_131072_keys(num_keys: int) -> None:
    """Dense and sparse attention over a long cache, against float64 in one piece."""
    ops, generator = operators("torch", torch.float32), torch.Generator().manual_seed(6)
    layout, page_size = PlainLayout(torch.float32, 12), 64
    pool = layout.allocate(-(-num_keys // page_size) + 1, page_size)
    entries = torch.randn(num_keys, 12, generator=generator)
    layout.write(pool, torch.arange(num_keys) + page_size, entries)
    q = torch.randn(2, 2, 12, generator=generator)
    count = torch.tensor([num_keys, num_keys - 5], dtype=torch.int32)
    slots = torch.arange(num_keys).repeat(2, 1) + page_size
    slots[1, -5:] = -1
    sparse = ops.kernels["sparse_mla"](q[..., :8], q[..., 8:], pool, slots, count, 0.3)
    key = entries[:, None].expand(-1, 2, -1)
    dense = ops.dense_mha(q, key, key[..., :8], count, 0.3)
    for row in range(2):
        seen = entries[: int(count[row])].double()
        out, lse = plain_attention(q[row].double(), seen, 8, 0.3)
        for got in (sparse, dense):
            assert torch.allclose(got[0][row].double(), out, atol=1e-5)
            assert torch.allclose(got[1][row].double(), lse, atol=1e-5)


def test_c7_scores_never_reach_two_gib() -> None:
    """2,048 rows at the end of 300,000 keys: every chunk stays in its budget, none is missing."""
    dims = AttentionDims(8, 512, 128, 64, 128, 2048, 32, 128)
    pages = [list(range(1, 4690))]
    geometry = build_geometry([2048], [300_000], {"tokens": pages}, 64)
    assert 2048 * 300_000 * 4 > 2**31
    for budget in (Budget(), Budget(score_bytes=1 << 31)):
        plan = plan_step(geometry, dims, budget=budget, policy=NEVER)
        sizes = [score_bytes(chunk, dims, Capabilities()) for chunk in plan.score_chunks]
        assert max(sizes) <= budget.score_bytes
        assert plan.scratch_bytes == max(sizes)
        pairs = sum(
            max(0, min(chunk.key_stop, 300_000 - 2048 + row + 1) - chunk.key_start)
            for chunk in plan.score_chunks
            for row in range(chunk.row_start, chunk.row_stop)
        )
        assert pairs == sum(range(300_000 - 2047, 300_001))


def test_c7_two_half_calls_give_what_one_call_gives() -> None:
    tokens, found = token_list(90), []
    for score_bytes_limit in (64 << 20, 40_000, 5_000):
        bench = Bench()
        one = bench.request("r", tokens)
        found.append(bench.prefill([one], budget=Budget(score_bytes=score_bytes_limit)))
    assert_same_rows(found[0], found[1], 1e-12)
    assert_same_rows(found[0], found[2], 1e-12)
