"""Cache writers and readers in Triton, under the interpreter: specs, and packed bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.layouts import (
    Fp8IndexKeyLayout,
    Fp8LatentLayout,
    KVLayout,
    PagedPool,
    PlainLayout,
)
from gnomon.attention.ops.values import IndexTransform
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.providers.triton import PROVIDER, cache
from gnomon.attention.spec import SPECS, Scale, check_provider
from gnomon.attention.spec.draw import normal, page_lists, rope_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LATENTS = (
    Fp8LatentLayout(512, 64),
    Fp8LatentLayout(512, 0, has_empty_rope_slot=True),
    Fp8LatentLayout(384, 16),
    Fp8LatentLayout(64, 32),
    Fp8LatentLayout(100, 0),
    PlainLayout(torch.bfloat16, 576),
)
PAGE = 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["latent_write", "index_prepare", "context_gather"])
def test_every_case_of_the_spec(op: str, dtype: torch.dtype) -> None:
    for case in SPECS[op].cases(Generator().manual_seed(3), dtype, Scale(num_rows=9)):
        result = check_provider(SPECS[op], PROVIDER, case, dtype)
        assert result.is_ok, result


def widths(layout: KVLayout) -> tuple[int, int]:
    if isinstance(layout, Fp8LatentLayout):
        return layout.latent_dim, layout.rope_dim
    return 512, layout.dim - 512


def twins(layout: KVLayout, stride: int | None = None) -> tuple[PagedPool, PagedPool]:
    """Two pools of the same random bytes, perhaps with a gap between pages."""
    pool = layout.allocate(6, PAGE, page_stride_bytes=stride)
    noise = torch.randint(0, 100, pool.storage.shape, generator=Generator().manual_seed(1))
    pool.storage.copy_(noise)
    return pool, PagedPool(layout, pool.storage.clone(), PAGE)


def close_in(layout: KVLayout, found: PagedPool, expected: PagedPool) -> None:
    """Equal bytes in nearly all tokens; a value at the edge of a code may fall to either side."""
    equal = (found.storage == expected.storage).float().mean()
    assert equal > 0.995, f"only {equal:.4f} of the bytes are equal"
    slots = torch.arange(found.num_slots)
    a, b = (layout.computing_in(torch.float32).gather(p, slots) for p in (found, expected))
    torch.testing.assert_close(a, b, rtol=2.0**-3, atol=2.0**-8, equal_nan=True)


@pytest.mark.parametrize("layout", LATENTS, ids=lambda layout: layout.id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latents_are_packed_as_the_layout_packs_them(layout: KVLayout, dtype: torch.dtype) -> None:
    rank, rope = widths(layout)
    generator = Generator().manual_seed(2)
    kv = normal(generator, (7, rank + rope), dtype)
    kv[1] *= 1e-4  # a norm lifts it
    kv[2, :8] = 0
    weight = normal(generator, (rank,), dtype)
    weight[: rank // 2] *= 1e-3  # groups of tiny numbers, at the floor of the scale
    slots = torch.tensor([5, 19, -1, 4, 23, 12, 7])
    stride = layout.page_bytes(PAGE) + 16
    found, expected = twins(layout, stride)
    rows = rope_rows([3, 0, 9, 100, 7, 8, 5], rope, True)
    for given, kernel in ((found, cache.latent_write), (expected, torch_provider.latent_write)):
        kernel(kv, weight, 1e-6, rows, given, slots)
    close_in(layout, found, expected)
    untouched = torch.ones(found.num_slots, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    kept = untouched.nonzero()[:, 0]
    before, _ = twins(layout, stride)
    assert torch.equal(layout.gather_bytes(found, kept), layout.gather_bytes(before, kept))


@pytest.mark.parametrize("dim", [128, 32])
@pytest.mark.parametrize("has_hadamard", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_index_keys_and_queries_are_rounded_by_the_layout(
    dtype: torch.dtype, has_hadamard: bool, dim: int
) -> None:
    layout = Fp8IndexKeyLayout(dim, read_dtype=dtype)
    generator = Generator().manual_seed(3)
    q, k = normal(generator, (5, 6, dim), dtype), normal(generator, (5, dim), dtype)
    q[0, 0] = 0
    weight, bias = (normal(generator, (dim,), dtype) for _ in range(2))
    transform = IndexTransform(weight, bias, 1e-6, has_hadamard)
    rows = rope_rows([3, 0, 9, 100, 7], 16, False)
    slots = torch.tensor([5, 19, -1, 4, 23])
    found, expected = twins(layout)
    queries = [
        kernel(q, k, transform, (rows, rows), pool, slots)
        for pool, kernel in ((found, cache.index_prepare), (expected, torch_provider.index_prepare))
    ]
    close_in(layout, found, expected)
    assert (queries[0] == queries[1]).float().mean() > 0.99
    torch.testing.assert_close(queries[0], queries[1], rtol=2.0**-3, atol=2.0**-8)


def test_numbers_that_are_not_finite_are_stored_as_nan() -> None:
    layout = Fp8LatentLayout(64, 32)
    kv = torch.ones(2, 96)
    kv[0, 90] = torch.inf
    pool = layout.computing_in(torch.float32).allocate(3, PAGE)
    weight = torch.ones(64)
    weight[3] = torch.nan
    cache.latent_write(kv, weight, 1e-6, rope_rows([1, 1], 32, True), pool, torch.tensor([4, 5]))
    entries = pool.layout.gather(pool, torch.tensor([4, 5]))
    assert entries.isnan()[:, :64].nonzero()[:, 1].tolist() == [3, 3]
    assert entries[1, 64:].isfinite().all()
    assert not entries[0, 88:92].isfinite().all()


@pytest.mark.parametrize(
    "layout",
    [*LATENTS, Fp8IndexKeyLayout(128), Fp8IndexKeyLayout(32), PlainLayout(torch.float32, 96)],
    ids=lambda layout: layout.id,
)
@pytest.mark.parametrize("read", [torch.bfloat16, torch.float32])
def test_gathered_entries_are_what_the_layout_reads(layout: KVLayout, read: torch.dtype) -> None:
    reading = layout.computing_in(read)
    generator = Generator().manual_seed(4)
    pages, num_pages = page_lists(generator, [18, 3], PAGE)
    pool = reading.allocate(num_pages, PAGE, page_stride_bytes=layout.page_bytes(PAGE) + 16)
    values = normal(generator, (num_pages * PAGE, layout.dim), torch.float32)
    reading.write(pool, torch.arange(num_pages * PAGE), values)
    for start, length in ((0, 18), (5, 9), (17, 1), (4, 0)):
        found = cache.context_gather(pool, pages[0], start, length)
        expected = reading.gather_range(pool, pages[0], start, length)
        assert found.dtype == read
        assert torch.equal(found, expected)


def test_a_write_of_keys_alone_and_of_queries_alone() -> None:
    layout = PlainLayout(torch.float32, 32)
    generator = Generator().manual_seed(5)
    transform = IndexTransform(torch.ones(32), torch.zeros(32), 1e-6)
    q, k = normal(generator, (3, 4, 32), torch.float32), normal(generator, (5, 32), torch.float32)
    none, three, five = (rope_rows(list(range(n)), 16, True) for n in (0, 3, 5))
    slots = torch.arange(4, 9)
    for queries, keys, rows in (
        (q[:0], k, (none, five)),
        (q, k[:0], (three, none)),
        (q[:0], k[:0], (none, none)),
    ):
        found, expected = twins(layout)
        at: Tensor = slots[: len(keys)]
        a = cache.index_prepare(queries, keys, transform, rows, found, at)
        b = torch_provider.index_prepare(queries, keys, transform, rows, expected, at)
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(found.typed(), expected.typed())
