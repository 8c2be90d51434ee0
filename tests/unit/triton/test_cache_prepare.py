"""The launch that joins latent_write, index_prepare and rope gives what the three give, bitwise."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, KVLayout, PlainLayout
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.providers.triton import cache, prepare, rows
from gnomon.attention.spec.draw import normal, rope_rows

PAGE = 4
LAYOUTS = [
    (Fp8LatentLayout(64, 32), Fp8IndexKeyLayout(32)),
    (PlainLayout(torch.bfloat16, 96), PlainLayout(torch.bfloat16, 32)),
]


def twins(layout: KVLayout) -> tuple[PagedPool, PagedPool]:
    return layout.allocate(6, PAGE), layout.allocate(6, PAGE)


def turned(num_rows: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, RopeRows]:
    """A view of wider queries, and its rotations."""
    wide = normal(Generator().manual_seed(num_rows), (num_rows, heads, 48), dtype)
    return wide[..., 16:], rope_rows(list(range(4, 4 + num_rows)), 32, True)


@pytest.mark.parametrize("has_hadamard", [False, True])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=["packed", "plain"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 5), (3, 7), (0, 4), (0, 0)])
def test_one_launch_for_the_three(
    num_queries: int, num_keys: int, layouts: tuple[KVLayout, KVLayout], has_hadamard: bool
) -> None:
    dtype, generator = torch.bfloat16, Generator().manual_seed(1)
    q_rope, rope = turned(num_keys, 6, dtype)
    q, k = normal(generator, (num_queries, 5, 32), dtype), normal(generator, (num_keys, 32), dtype)
    weight, bias = (normal(generator, (32,), dtype) for _ in range(2))
    index_rows = tuple(rope_rows(list(range(n)), 16, False) for n in (num_queries, num_keys))
    transform = IndexTransform(weight, bias, 1e-6, has_hadamard)
    wide = normal(generator, (num_keys, 120), dtype)
    slots = torch.tensor([5, 19, -1, 4, 22, 12, 7])[:num_keys]
    latents, keys = (twins(layout) for layout in layouts)
    norm = normal(generator, (64,), dtype)
    latent = wide[:, 8:104], norm, 1e-6, rope
    index = q, k, transform, index_rows

    found = prepare.prepare_attention(
        q_rope, rope, (*latent, latents[0], slots), (*index, keys[0], slots)
    )
    cache.latent_write(*latent, latents[1], slots)
    query = cache.index_prepare(*index, keys[1], slots)
    assert torch.equal(found[0], rows.rope(q_rope, rope))
    assert torch.equal(found[1], query)
    assert torch.equal(latents[0].storage, latents[1].storage)
    assert torch.equal(keys[0].storage, keys[1].storage)
    assert bool(latents[0].storage.any()) == (num_keys > 0)


@pytest.mark.parametrize("layout", [pair[0] for pair in LAYOUTS], ids=["packed", "plain"])
@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_a_layer_without_an_indexer(num_rows: int, layout: KVLayout) -> None:
    q_rope, rope = turned(num_rows, 40, torch.float32)
    kv = normal(Generator().manual_seed(2), (num_rows, 96), torch.float32)
    latents, slots = twins(layout), torch.arange(4, 4 + num_rows)
    latent = kv, torch.ones(64), 1e-6, rope
    found = prepare.write_latent_and_rope(q_rope, rope, (*latent, latents[0], slots))
    cache.latent_write(*latent, latents[1], slots)
    assert torch.equal(found, rows.rope(q_rope, rope))
    assert torch.equal(latents[0].storage, latents[1].storage)
