"""The torch kernels over packed caches: FP8 latents and FP8 index keys, read through the layout.

The specs draw plain pools; here the same arguments meet bytes that cannot be seen as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
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
    read = []
    for kernels in (FAST, TRUTH):
        latent_pool = latents(dtype).allocate(4, PAGE)
        key_pool = index_keys(dtype).allocate(4, PAGE)
        kernels["latent_write"](kv, weight, 1e-6, rows, latent_pool, slots)
        kernels["index_prepare"](q, k, transform, (rows, rows), key_pool, slots)
        everything = torch.arange(4 * PAGE)
        read.append([p.layout.gather(p, everything).float() for p in (latent_pool, key_pool)])
    for got, expected in zip(*read, strict=True):
        assert int((got != 0).any(1).sum()) == 9
        torch.testing.assert_close(got, expected, rtol=2.0**-3, atol=1e-2)
        assert float((got != expected).float().mean()) < 0.01
