"""The torch kernels over packed caches: FP8 latents and FP8 index keys, read through the layout.

The specs draw plain pools; here the same arguments meet bytes that cannot be seen as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.attention.layouts import IndexKeyDims, LatentDims, choose_layout
from gnomon.attention.layouts.base import KVLayout, Operation, PagedPool
from gnomon.attention.ops.values import IndexTransform
from gnomon.attention.providers import reference
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.spec.draw import page_lists, rope_rows, slot_lists

FAST, TRUTH = torch_provider.PROVIDER.kernels, reference.PROVIDER.kernels
PAGE = 16


def packed(layout: KVLayout, num_pages: int, seed: int) -> PagedPool:
    assert Operation.TYPED_VIEW not in layout.operations
    pool = layout.allocate(num_pages, PAGE)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_pages * PAGE, layout.dim, generator=generator)
    layout.write(pool, torch.arange(num_pages * PAGE), values)
    return pool


def latents(dtype: torch.dtype) -> KVLayout:
    return choose_layout("fp8_ds_mla_656", LatentDims(512, 64), dtype)


def index_keys(dtype: torch.dtype) -> KVLayout:
    return choose_layout("index_k_132", IndexKeyDims(128), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_mla(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = packed(latents(dtype), 4, 1)
    slots, count = slot_lists(generator, [40, 0, 17, 1], 40, pool.num_slots)
    q = torch.randn(4, 3, 576, generator=generator).to(dtype)
    arguments = q[..., :512], q[..., 512:], pool, slots, count, 0.06
    got, expected = FAST["sparse_mla"](*arguments), TRUTH["sparse_mla"](*arguments)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-4)
    assert got[0].dtype == dtype


def scored(
    kernels: Mapping[str, Callable[..., Any]], pool: PagedPool, pages: Tensor, dtype: torch.dtype
) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 64, 128, generator=generator).to(dtype)
    w = torch.randn(3, 64, generator=generator).to(dtype)
    count = torch.tensor([50, 3, 0], dtype=torch.int32)
    result: Tensor = kernels["index_scores_paged"](q, w, pool, pages, count, 0.01)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_scores(dtype: torch.dtype) -> None:
    pages, num_pages = page_lists(torch.Generator().manual_seed(3), [50, 3, 0], PAGE)
    pool = packed(index_keys(dtype), num_pages, 2)
    got, expected = scored(FAST, pool, pages, dtype), scored(TRUTH, pool, pages, dtype)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_give_the_same_bytes_but_for_ties_in_rounding(dtype: torch.dtype) -> None:
    """Both providers hand the layout nearly equal numbers; a byte may differ by one code."""
    generator = torch.Generator().manual_seed(4)
    rows = rope_rows(list(range(5, 14)), 64, True)
    slots = torch.randperm(32, generator=generator)[:9] + PAGE
    kv = torch.randn(9, 576, generator=generator).to(dtype)
    q = torch.randn(9, 64, 128, generator=generator).to(dtype)
    k = torch.randn(9, 128, generator=generator).to(dtype)
    weight = torch.rand(512, generator=generator).to(dtype) + 0.5
    transform = IndexTransform(torch.ones(128), torch.zeros(128), 1e-6, has_hadamard=True)
    read: list[list[Tensor]] = []
    for kernels in (FAST, TRUTH):
        latent_pool = latents(dtype).allocate(4, PAGE)
        key_pool = index_keys(dtype).allocate(4, PAGE)
        kernels["latent_write"](kv, weight, 1e-6, rows, latent_pool, slots)
        query = kernels["index_prepare"](q, k, transform, (rows, rows), key_pool, slots)
        assert query.dtype == dtype
        everything = torch.arange(4 * PAGE)
        pools = (latent_pool, key_pool)
        read.append([query.float(), *(p.layout.gather(p, everything).float() for p in pools)])
    for got, expected in zip(*read, strict=True):
        assert int((got != 0).flatten(1).any(1).sum()) == 9
        torch.testing.assert_close(got, expected, rtol=2.0**-3, atol=1e-2)
        assert float((got != expected).float().mean()) < 0.01


@pytest.mark.parametrize("kernels", [FAST, TRUTH], ids=["torch", "reference"])
def test_queries_are_codes_times_a_power_of_two(
    kernels: Mapping[str, Callable[..., Any]],
) -> None:
    """Per row and head, at most 448 times a power of two; a plain pool leaves the query alone."""
    generator = torch.Generator().manual_seed(5)
    rows = rope_rows(list(range(7)), 64, False)
    q = torch.randn(7, 4, 128, generator=generator) * torch.logspace(-6, 4, 7)[:, None, None]
    k = torch.randn(7, 128, generator=generator)
    transform, nowhere = IndexTransform(torch.ones(128), torch.zeros(128)), torch.full((7,), -1)
    packed_pool = index_keys(torch.float32).allocate(2, PAGE)
    plain_pool = choose_layout("fp32_128", IndexKeyDims(128), torch.float32).allocate(2, PAGE)
    query = kernels["index_prepare"](q, k, transform, (rows, rows), packed_pool, nowhere)
    whole = kernels["index_prepare"](q, k, transform, (rows, rows), plain_pool, nowhere)
    allowed = {code for code in torch.arange(256, dtype=torch.uint8).tolist() if code % 128 != 127}
    grid = torch.tensor(sorted(allowed), dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for value, exact in zip(query.view(-1, 128), whole.view(-1, 128), strict=True):
        least = max(float(exact.abs().max()), 1e-4) / 448
        scale = 2.0 ** math.ceil(math.log2(least))
        assert torch.isin(value.double() / scale, grid).all()
        assert ((value - exact).abs() <= exact.abs() * 2.0**-4 + scale * 2.0**-10).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.floats(-6e4, 6e4, width=32, allow_subnormal=False).map(lambda x: x * 1e-3),
        min_size=8,
        max_size=8,
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rounding_queries_again_changes_nothing(numbers: list[float], dtype: torch.dtype) -> None:
    layout = choose_layout("index_k_12", IndexKeyDims(8), dtype)
    assert layout.rounds_queries
    once = layout.round_queries(torch.tensor([numbers], dtype=dtype))
    assert once.dtype == dtype
    assert torch.equal(layout.round_queries(once), once)


def test_queries_that_are_not_finite_become_nan_alone() -> None:
    layout = index_keys(torch.float32)
    query = torch.full((2, 3, 128), 0.5)
    query[0, 1, 7], query[1, 2, 0] = torch.nan, torch.inf
    found = layout.round_queries(query)
    assert found.isnan().nonzero().tolist() == [[0, 1, 7], [1, 2, 0]]
    assert (found[~found.isnan()] == 0.5).all()
