"""In fp32 a row's bits depend on that row's own data: alone, in any batch, at any place in it.

The promise behind "alone = in any batch" (design.md §9): no tolerance, torch.equal.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnomon.attention.dispatch import OPERATORS, OpNeed
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.values import IndexTransform
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.providers.torch.attention import list_width
from gnomon.attention.spec.draw import rope_rows, slot_lists

NEED = OpNeed(is_deterministic=True)
FIXED = {op: torch_provider.PROVIDER.kernel(op, NEED) for op in OPERATORS}
SIZES = [(4, 64, 16, 16), (3, 20, 4, 24), (16, 128, 64, 96)]  # heads, D_c, D_r, width


def some_subsets(num_rows: int, seed: int = 0) -> list[Tensor]:
    """Each row alone for a few, then random subsets in random order."""
    generator = torch.Generator().manual_seed(seed)
    alone = [torch.tensor([row]) for row in range(0, num_rows, 5)]
    sizes = (2, 7, 9, 16, num_rows)
    return alone + [torch.randperm(num_rows, generator=generator)[:size] for size in sizes]


@pytest.mark.parametrize(("heads", "rank", "rope", "width"), SIZES)
def test_sparse_mla(heads: int, rank: int, rope: int, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = PlainLayout(torch.float32, rank + rope).allocate(40, 16)
    pool.typed().copy_(torch.randn(640, rank + rope, generator=generator))
    counts = torch.randint(0, width + 1, (37,), generator=generator).tolist()
    counts[:5] = [0, 1, width, width - 1, width]
    slots, count = slot_lists(generator, counts, width, 640)
    q = torch.randn(37, heads, rank, generator=generator)
    q_rope = torch.randn(37, heads, rope, generator=generator)
    out, lse = FIXED["sparse_mla"](q, q_rope, pool, slots, count, 0.1)
    for rows in some_subsets(37):
        # The list of a lone row is as wide as its step's longest list, which may be its own.
        own = slots[rows][:, : max(1, int(count[rows].max()))]
        part = FIXED["sparse_mla"](q[rows], q_rope[rows], pool, own, count[rows], 0.1)
        assert torch.equal(part[0], out[rows])
        assert torch.equal(part[1], lse[rows])


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 24, 25, 32, 33, 48, 49, 64, 2047, 2048])
def test_list_width_holds_the_count_and_wastes_little(count: int) -> None:
    width = list_width(count)
    assert width >= count
    assert width <= max(16, count * 3 // 2) or count == 0
    assert list_width(width) == width


@pytest.mark.parametrize(("experts", "k", "dim", "inner"), [(16, 4, 256, 128), (5, 2, 64, 48)])
def test_moe(experts: int, k: int, dim: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(2)
    gate_up = torch.randn(experts, 2 * inner, dim, generator=generator) * dim**-0.5
    down = torch.randn(experts, dim, inner, generator=generator) * inner**-0.5
    for num_rows in (37, 300):
        x = torch.randn(num_rows, dim, generator=generator)
        ids = torch.rand(num_rows, experts, generator=generator).argsort(1)[:, :k]
        ids[3], ids[7, 0] = -1, -1
        weights = torch.rand(num_rows, k, generator=generator)
        whole = FIXED["moe"](x, ids, weights, gate_up, down)
        for rows in some_subsets(num_rows)[-12:]:
            part = FIXED["moe"](x[rows], ids[rows], weights[rows], gate_up, down)
            assert torch.equal(part, whole[rows])


@pytest.mark.parametrize(("heads", "dim"), [(16, 32), (64, 128), (3, 20)])
def test_index_scores_contiguous_paged_and_chunked(heads: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(3)
    num_rows, num_keys, size = 19, 150, 16
    pool = PlainLayout(torch.float32, dim).allocate(11, size)
    pool.typed().copy_(torch.randn(11 * size, dim, generator=generator))
    pages = torch.randperm(10, generator=generator).to(torch.int32)[None] + 1
    keys = pool.layout.gather_range(pool, pages[0], 0, num_keys)
    q = torch.randn(num_rows, heads, dim, generator=generator)
    w = torch.randn(num_rows, heads, generator=generator)
    count = torch.full((num_rows,), num_keys, dtype=torch.int32)
    whole = FIXED["index_scores"](q, w, keys, count, 0.2)
    for rows in some_subsets(num_rows):
        part = FIXED["index_scores"](q[rows], w[rows], keys, count[rows], 0.2)
        assert torch.equal(part, whole[rows])
        same = pages.expand(len(rows), -1)
        paged = FIXED["index_scores_paged"](q[rows], w[rows], pool, same, count[rows], 0.2)
        assert torch.equal(paged[:, :num_keys], whole[rows])
    for start, stop in ((0, 1), (0, 7), (3, 40), (70, 81), (149, 150), (16, 144)):
        few = torch.full((num_rows,), stop - start, dtype=torch.int32)
        part = FIXED["index_scores"](q, w, keys[start:stop], few, 0.2)
        assert torch.equal(part, whole[:, start:stop])


def test_norms_rope_and_index_keys() -> None:
    generator = torch.Generator().manual_seed(4)
    num_rows, heads, dim = 37, 16, 32
    x = torch.randn(num_rows, 256, generator=generator)
    weight, bias = torch.randn(256, generator=generator), torch.randn(256, generator=generator)
    positions = torch.randint(0, 500, (num_rows,), generator=generator)
    q = torch.randn(num_rows, heads, dim, generator=generator)
    k = torch.randn(num_rows, dim, generator=generator)
    transform = IndexTransform(weight[:dim], bias[:dim], 1e-6, has_hadamard=True)

    def prepare(rows: Tensor) -> tuple[Tensor, Tensor]:
        pool = PlainLayout(torch.float32, dim).allocate(4, 16)
        turns = rope_rows(positions[rows].tolist(), 16, True)
        slots = torch.arange(len(rows)) + 16
        query = FIXED["index_prepare"](q[rows], k[rows], transform, (turns, turns), pool, slots)
        return query, pool.typed()[slots]

    everything = torch.arange(num_rows)
    query, key = prepare(everything)
    rms = FIXED["rms_norm"](x, weight, 1e-6)
    layer = FIXED["layer_norm"](x, weight, bias, 1e-6)
    for rows in some_subsets(num_rows):
        assert torch.equal(FIXED["rms_norm"](x[rows], weight, 1e-6), rms[rows])
        assert torch.equal(FIXED["layer_norm"](x[rows], weight, bias, 1e-6), layer[rows])
        part_query, part_key = prepare(rows)
        assert torch.equal(part_query, query[rows])
        assert torch.equal(part_key, key[rows])
