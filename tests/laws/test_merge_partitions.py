"""Law: partitions merged = whole. Any split of a row's keys, attended apart and joined by lse.

Holds for context-parallel shards, split-KV and chunked context, because all use lse_merge.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.providers import builtin_providers
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.spec.draw import slot_lists

FAST = torch_provider.PROVIDER.kernels
Partial = tuple[Tensor, Tensor]


def merged(parts: list[Partial]) -> Partial:
    result = parts[0]
    for part in parts[1:]:
        result = FAST["lse_merge"](*result, *part)
    return result


def close(found: Partial, expected: Partial, tolerance: float) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=tolerance)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(0, 3))
def test_sparse_lists_split_over_owners(owners: list[int], seed: int) -> None:
    """Key i of every row belongs to owners[i]; an owner may have none."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = 4, len(owners)
    pool = PlainLayout(torch.float64, 12).allocate(4, 16)
    pool.typed().copy_(torch.randn(64, 12, generator=generator, dtype=torch.float64))
    slots, count = slot_lists(generator, [width] * num_rows, width, 64)
    q = torch.randn(num_rows, 2, 12, generator=generator, dtype=torch.float64)
    q_latent, q_rope = q[..., :8], q[..., 8:]
    whole = FAST["sparse_mla"](q_latent, q_rope, pool, slots, count, 0.7)
    parts = []
    for owner in range(4):
        own = [place for place, name in enumerate(owners) if name == owner]
        part_slots = slots[:, own] if own else slots[:, :1] * 0 - 1
        part_count = torch.full_like(count, len(own))
        parts.append(FAST["sparse_mla"](q_latent, q_rope, pool, part_slots, part_count, 0.7))
    close(merged(parts), whole, 1e-12)
    close(merged(parts[::-1]), whole, 1e-12)


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(0, 3))
def test_dense_context_split_anywhere(cuts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_keys = 6, 40

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(num_rows, 2, 8), draw(num_keys, 2, 8), draw(num_keys, 2, 5)
    visible = torch.tensor([1, 12, 39, 40, 0, 25], dtype=torch.int32)
    whole = FAST["dense_mha"](q, k, v, visible, 0.4)
    edges = [0, *sorted(cuts), num_keys]
    parts = [
        FAST["dense_mha"](
            q, k[start:stop], v[start:stop], (visible - start).clamp(0, stop - start), 0.4
        )
        for start, stop in pairwise(edges)
    ]
    close(merged(parts), whole, 1e-12)
    assert bool((whole[0][4] == 0).all())
    assert bool((whole[1][4] == -torch.inf).all())


@pytest.mark.parametrize("provider", builtin_providers(), ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_empty_partial_is_the_identity_to_the_bit(
    provider: KernelSet, dtype: torch.dtype
) -> None:
    merge = provider.kernels["lse_merge"]
    out = torch.randn(5, 3, 8).to(dtype)
    lse = (torch.randn(5, 3) * 30).to(torch.float64 if dtype == torch.float64 else torch.float32)
    lse[2] = -torch.inf
    out[2] = 0
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for found in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)
