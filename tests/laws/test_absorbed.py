"""Law: absorbed = un-absorbed MLA, in float64 to 1e-12 (oracle_math.md §1.2).

Un-absorbed: expand each latent to a key and a value of every head, attend densely. Absorbed: carry
the query into the latent space, attend the latents, carry the result back. The same weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.providers import builtin_providers
from gnomon.attention.spec.draw import slot_lists

H, RANK, NOPE, ROPE, VALUE = 4, 48, 16, 8, 24


def weights_and_cache(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """W_UK [H, NOPE, RANK], W_UV [H, VALUE, RANK], entries [80, RANK + ROPE], float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return (
        draw(H, NOPE, RANK) * RANK**-0.5,
        draw(H, VALUE, RANK) * RANK**-0.5,
        draw(80, RANK + ROPE),
    )


@pytest.mark.parametrize("provider", builtin_providers(), ids=lambda p: p.name)
@pytest.mark.parametrize("seed", range(3))
def test_absorbed_equals_expanded(provider: KernelSet, seed: int) -> None:
    kernels = provider.kernels
    up_key, up_value, entries = weights_and_cache(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    num_rows, scale = 9, (NOPE + ROPE) ** -0.5
    q = torch.randn(num_rows, H, NOPE + ROPE, generator=generator, dtype=torch.float64)
    slots, count = slot_lists(generator, [1, 5, 17, 40, 2, 40, 33, 8, 16], 40, 80)
    pool = PlainLayout(torch.float64, RANK + ROPE).allocate(5, 16)
    pool.typed().copy_(entries)
    absorbed = torch.einsum("rhn,hnc->rhc", q[..., :NOPE], up_key)
    latent, lse = kernels["sparse_mla"](absorbed, q[..., NOPE:], pool, slots, count, scale)
    out = torch.einsum("rhc,hvc->rhv", latent, up_value)
    for row in range(num_rows):
        listed = entries[slots[row, : int(count[row])]]
        latents, rope = listed[:, :RANK], listed[:, RANK:]
        k = torch.cat(
            (torch.einsum("nc,hdc->nhd", latents, up_key), rope[:, None].expand(-1, H, -1)), -1
        )
        v = torch.einsum("nc,hvc->nhv", latents, up_value)
        visible = count[row, None]
        expected, dense_lse = kernels["dense_mha"](q[row, None], k, v, visible, scale)
        torch.testing.assert_close(out[row], expected[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[row], dense_lse[0], rtol=0, atol=1e-12)


def test_the_law_can_fail() -> None:
    """With W_UK of another head the two forms differ: the comparison is not vacuous."""
    up_key, _, entries = weights_and_cache(0)
    q = torch.randn(2, H, NOPE, dtype=torch.float64)
    latents = entries[:6, :RANK]
    right = torch.einsum("rhn,hnc,sc->rhs", q, up_key, latents)
    expanded = torch.einsum("rhn,shn->rhs", q, torch.einsum("sc,hnc->shn", latents, up_key))
    wrong = torch.einsum("rhn,hnc,sc->rhs", q, up_key.roll(1, 0), latents)
    torch.testing.assert_close(right, expanded, rtol=0, atol=1e-12)
    assert float((right - wrong).abs().max()) > 0.1
