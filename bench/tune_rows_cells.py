"""The calls that tune_rows.py times: per kernel its name, bytes read and written once, and a maker.

In:  a number of tokens, and of the writes their tile. Out: (name, bytes, maker of a call on fresh
     arguments); `check`: shares of what a tile writes that equal the torch provider's, by bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, KVLayout, PlainLayout
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.providers.triton import (
    cache,
    linear_quantise,
    prepare,
    rows,
    rows_quantise,
)
from gnomon.attention.providers.triton.cache import RowsTile
from gnomon.attention.spec.draw import rope_rows

BF16 = torch.bfloat16
PAGE = 64
LATENTS: tuple[KVLayout, ...] = (PlainLayout(BF16, 576), Fp8LatentLayout(512, 64))
KEYS: tuple[KVLayout, ...] = (PlainLayout(BF16, 128), Fp8IndexKeyLayout(128))
Call = Callable[[], Any]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def rotations(num_rows: int, dim: int, is_interleaved: bool) -> RopeRows:
    rows = rope_rows(list(range(num_rows)), dim, is_interleaved)
    return RopeRows(rows.axis, rows.cos.cuda(), rows.sin.cuda(), is_interleaved)


def norms(n: int) -> Iterator[tuple[str, int, Callable[[], Call]]]:
    weight = numbers(7168)

    def norm() -> Call:
        x = numbers(n, 7168)
        return lambda: rows.rms_norm(x, weight, 1e-6)

    def residual() -> Call:
        x, delta = numbers(n, 7168), numbers(n, 7168)
        return lambda: rows.add_rms_norm(x, delta, weight, 1e-6)

    turn = rotations(n, 64, True)

    def turned() -> Call:
        heads = numbers(n, 128, 192)[..., 128:]
        return lambda: rows.rope(heads, turn)

    yield "rms_norm 7168", 4 * n * 7168, norm
    yield "add_rms_norm 7168", 8 * n * 7168, residual
    yield "rope 128 x 64 of 192", n * (4 * 128 * 64 + 512), turned


def codes(n: int) -> Iterator[tuple[str, int, Callable[[], Call]]]:
    weight = numbers(7168)

    def quantised() -> Call:
        x = numbers(n, 7168)
        return lambda: linear_quantise.quantise_rows(x, False)

    def activated() -> Call:
        x = numbers(n, 4096)
        return lambda: linear_quantise.silu_quantise(x, False)

    def normed() -> Call:
        x, delta = numbers(n, 7168), numbers(n, 7168)
        return lambda: rows_quantise.norm_quantise(x, delta, weight, 1e-6, False)

    yield "quantise_rows 7168", n * (3 * 7168 + 4 * 56), quantised
    yield "silu_quantise 2048", n * (5 * 2048 + 4 * 16), activated
    yield "norm_quantise 7168", n * (9 * 7168 + 4 * 56), normed


def writes(n: int, tile: RowsTile) -> Iterator[tuple[str, int, Callable[[], Call]]]:
    turn, index_turn = rotations(n, 64, True), rotations(n, 64, False)
    norm, weight, bias = numbers(512), numbers(128), numbers(128)
    slots = torch.randperm(n, device="cuda") + PAGE
    pages = n // PAGE + 2
    for latent, key in zip(LATENTS, KEYS, strict=True):

        def write(latent: KVLayout = latent) -> Call:
            kv, pool = numbers(n, 2112)[:, 1536:], latent.allocate(pages, PAGE, device="cuda")
            return lambda: cache.latent_write(kv, norm, 1e-6, turn, pool, slots, tile)

        def index(key: KVLayout = key) -> Call:
            q, k, pool = numbers(n, 64, 128), numbers(n, 128), key.allocate(pages, PAGE, "cuda")
            transform = IndexTransform(weight, bias, 1e-6)
            both = index_turn, index_turn
            return lambda: cache.index_prepare(q, k, transform, both, pool, slots, tile)

        def joined(latent: KVLayout = latent, key: KVLayout = key) -> Call:
            kv, heads = numbers(n, 2112)[:, 1536:], numbers(n, 128, 192)[..., 128:]
            q, k = numbers(n, 64, 128), numbers(n, 128)
            pools = [x.allocate(pages, PAGE, "cuda") for x in (latent, key)]
            first = (kv, norm, 1e-6, turn, pools[0], slots)
            transform, both = IndexTransform(weight, bias, 1e-6), (index_turn, index_turn)
            second = (q, k, transform, both, pools[1], slots)
            return lambda: prepare.prepare_attention(heads, turn, first, second, tile)

        latent_bytes = n * (1152 + 512 + 8 + latent.bytes_per_token)
        index_bytes = n * (4 * 64 * 128 + 256 + 1024 + 8 + key.bytes_per_token)
        yield f"latent_write {latent.id}", latent_bytes, write
        yield f"index_prepare {key.id}", index_bytes, index
        total = latent_bytes + index_bytes + n * (4 * 128 * 64 + 512)
        yield f"prepare_attention {latent.id}", total, joined


def gathers(n: int) -> Iterator[tuple[str, int, Callable[[], Call]]]:
    pages = torch.randperm(n // PAGE, device="cuda").to(torch.int32) + 1
    for layout in (*LATENTS, KEYS[1]):

        def gather(layout: KVLayout = layout) -> Call:
            pool = layout.allocate(n // PAGE + 1, PAGE, device="cuda")
            return lambda: cache.context_gather(pool, pages, 0, n)

        yield f"context_gather {layout.id}", n * (layout.bytes_per_token + 2 * layout.dim), gather


def check(tile: RowsTile) -> str:
    """Bytes and queries beside the torch provider's on the CPU: shares that are equal."""
    n = 203
    generator = torch.Generator().manual_seed(1)
    kv, q, k = (
        torch.randn(shape, generator=generator).to(BF16)
        for shape in ((n, 576), (n, 64, 128), (n, 128))
    )
    kv[5, 3], kv[6, 570], q[3, 2, 5], q[4, 1] = torch.nan, torch.inf, -torch.inf, torch.nan
    norm, weight, bias = (
        torch.randn(width, generator=generator).to(BF16) for width in (512, 128, 128)
    )
    slots = torch.randperm(n, generator=generator) + PAGE
    slots[7] = -1
    turns = [rope_rows(list(range(n)), 64, kind) for kind in (True, False)]
    shares = []
    for latent, key in zip(LATENTS, KEYS, strict=True):
        results = []
        for device, provider in (("cpu", torch_provider), ("cuda", cache)):
            at = [x.to(device) for x in (kv, norm, slots, q, k, weight, bias)]
            rows_at = [
                RopeRows(t.axis, t.cos.to(device), t.sin.to(device), t.is_interleaved)
                for t in turns
            ]
            pools = [x.allocate(n // PAGE + 2, PAGE, device=device) for x in (latent, key)]
            for pool in pools:
                pool.storage.zero_()
            extra = (tile,) if device == "cuda" else ()
            provider.latent_write(at[0], at[1], 1e-6, rows_at[0], pools[0], at[2], *extra)
            transform, both = IndexTransform(at[5], at[6], 1e-6), (rows_at[1], rows_at[1])
            turned = provider.index_prepare(at[3], at[4], transform, both, pools[1], at[2], *extra)
            results.append([pools[0].storage.cpu(), pools[1].storage.cpu(), turned.cpu()])
        for a, b in zip(*results, strict=True):
            same = (a == b) | ((a != a) & (b != b))
            shares.append(same.float().mean().item())
    return " ".join(f"{share:.5f}" for share in shares)
