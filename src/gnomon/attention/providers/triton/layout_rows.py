"""The device half of the cache layouts: load and store tokens of a pool inside kernels.

In:  the bytes of a pool (uint8 for packed layouts, numbers for plain ones), slots or token
     addresses, fp32 values. Out: the same bytes and numbers as layouts/{plain,fp8_ds_mla_656,
     index_k_132}.py give, whose byte maps are stated there and nowhere else; changes go together.
Kernels that touch cache bytes do so through these functions. Offsets are int64.
`PoolView` is the host's half: the pointer and the constants that a kernel needs of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, PagedPool, PlainLayout
from gnomon.attention.providers.triton.language import (
    decode_e4m3,
    encode_e4m3,
    has_native_fp8,
    is_finite,
    power_of_two_scale,
    round_to,
)
from gnomon.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a kernel needs of a pool. ``stride``, ``width``: elements of ``data`` a page, a token.

    ``width`` is that of the first plane where there are two (index_k). ``group``: numbers that
    share a scale, 0 for a plain layout. ``data`` is aligned as the layout says.
    """

    data: Tensor
    stride: int
    width: int
    page_size: int
    group: int
    is_native: bool

    @property
    def is_packed(self) -> bool:
        """Whether the bytes are e4m3 codes and scales, not numbers."""
        return self.group > 0

    @classmethod
    def of(cls, pool: PagedPool) -> PoolView:
        """Raises UnsupportedError for a layout without device functions."""
        layout, size = pool.layout, pool.page_size
        is_native = has_native_fp8(pool.device)
        if isinstance(layout, PlainLayout):
            data = pool.typed_pages()
            return cls(data, data.stride(0), layout.dim, size, 0, is_native)
        stride = pool.page_stride_bytes
        if isinstance(layout, Fp8LatentLayout):
            width = layout.bytes_per_token
            return cls(pool.storage, stride, width, size, layout.group_width, is_native)
        if isinstance(layout, Fp8IndexKeyLayout):
            dim = layout.head_dim
            return cls(pool.storage, stride, dim, size, dim, is_native)
        raise UnsupportedError(
            f"the triton provider has no device functions for layout {layout.id}; use the torch "
            "provider, or a plain, fp8_ds_mla or index_k layout"
        )


@triton.jit
def token_at(pool, slot, stride, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """Address of the first element of each slot's token (first plane)."""
    wide = slot.to(tl.int64)
    return pool + (wide // PAGE) * stride + (wide % PAGE) * WIDTH


@triton.jit
def latent_scale(amax):
    """Scale of a group of latents (fp8_ds_mla)."""
    return power_of_two_scale(tl.maximum(tl.div_rn(amax, 448.0), 1e-4))


@triton.jit
def index_scale(amax):
    """Scale of an index key or query (index_k)."""
    return power_of_two_scale(tl.div_rn(tl.maximum(amax, 1e-4), 448.0))


@triton.jit
def finite_amax(x, axis: tl.constexpr):
    """Largest finite magnitude of ``x`` along ``axis``; 0 if there is none."""
    return tl.max(tl.where(is_finite(x), tl.abs(x), 0.0), axis)


@triton.jit
def store_latent(
    token,
    latent,
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store one packed token's latents: fp32 [groups, columns] blocks, padded to powers of two.

    ``token``: address of its first byte. Rows from RANK / GROUP on and columns from GROUP on are
    padding, of zeros.
    """
    group = tl.arange(0, latent.shape[0])[:, None]
    column = tl.arange(0, latent.shape[1])[None, :]
    scale = latent_scale(finite_amax(latent, 1))
    codes = encode_e4m3(latent * tl.div_rn(1.0, scale)[:, None], NATIVE)
    inside = (column < GROUP) & (group * GROUP < RANK)
    tl.store(token + group * GROUP + column, codes, mask=inside)
    number = tl.arange(0, latent.shape[0])
    scales = (token + RANK).to(tl.pointer_type(tl.float32))
    tl.store(scales + number, scale, mask=number * GROUP < RANK)


@triton.jit
def store_latent_rope(token, rope, RANK: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr):
    """Store one packed token's rope part: fp32 [1, columns], padded; kept as bf16."""
    column = tl.arange(0, rope.shape[1])[None, :]
    place = (token + (RANK + RANK // GROUP * 4)).to(tl.pointer_type(tl.bfloat16))
    tl.store(place + column, round_to(rope, tl.bfloat16), mask=column < ROPE)


@triton.jit
def clear_empty_rope(token, RANK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the rope slot of one packed token that has no rope; BLOCK: its bf16 numbers."""
    place = (token + (RANK + RANK // GROUP * 4)).to(tl.pointer_type(tl.int16))
    tl.store(place + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int16))


@triton.jit
def load_latent(
    token,
    is_there,
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Latents of packed tokens [N] as fp32 [N, GROUPS_BLOCK, GROUP_BLOCK]; 0 where not there."""
    group = tl.arange(0, GROUPS_BLOCK)[None, :, None]
    column = tl.arange(0, GROUP_BLOCK)[None, None, :]
    inside = is_there[:, None, None] & (column < GROUP) & (group * GROUP < RANK)
    codes = tl.load(token[:, None, None] + group * GROUP + column, mask=inside, other=0)
    scales = (token + RANK).to(tl.pointer_type(tl.float32))
    number = tl.arange(0, GROUPS_BLOCK)[None, :]
    known = is_there[:, None] & (number * GROUP < RANK)
    scale = tl.load(scales[:, None] + number, mask=known, other=0.0)
    return decode_e4m3(codes, NATIVE) * scale[:, :, None]


@triton.jit
def load_latent_rope(
    token,
    is_there,
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """Rope parts of packed tokens [N] as fp32 [N, ROPE_BLOCK]; 0 where not there."""
    column = tl.arange(0, ROPE_BLOCK)[None, :]
    place = (token + (RANK + RANK // GROUP * 4)).to(tl.pointer_type(tl.bfloat16))
    inside = is_there[:, None] & (column < ROPE)
    return tl.load(place[:, None] + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def index_scales_at(pool, slot, stride, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Address of each slot's scale in an index_k pool: after all keys of the page."""
    wide = slot.to(tl.int64)
    scales = (pool + (wide // PAGE) * stride + PAGE * DIM).to(tl.pointer_type(tl.float32))
    return scales + wide % PAGE


@triton.jit
def store_index_keys(
    pool,
    slot,
    keys,
    stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store index keys, fp32 [N, columns], padding columns of zeros; slot < 0 stores nothing."""
    column = tl.arange(0, keys.shape[1])[None, :]
    is_there = slot >= 0
    scale = index_scale(finite_amax(keys, 1))
    codes = encode_e4m3(keys * tl.div_rn(1.0, scale)[:, None], NATIVE)
    token = token_at(pool, slot, stride, PAGE, DIM)
    tl.store(token[:, None] + column, codes, mask=is_there[:, None] & (column < DIM))
    tl.store(index_scales_at(pool, slot, stride, PAGE, DIM), scale, mask=is_there)


@triton.jit
def load_index_keys(
    pool,
    slot,
    is_there,
    stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Index keys of slots [N] as fp32 [N, BLOCK]; 0 where not there."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = is_there[:, None] & (column < DIM)
    token = token_at(pool, slot, stride, PAGE, DIM)
    codes = tl.load(token[:, None] + column, mask=inside, other=0)
    scale = tl.load(index_scales_at(pool, slot, stride, PAGE, DIM), mask=is_there, other=0.0)
    return decode_e4m3(codes, NATIVE) * scale[:, None]


@triton.jit
def round_as_index(x, NATIVE: tl.constexpr):
    """Index queries, fp32 [N, columns], rounded as a stored key would be."""
    scale = index_scale(finite_amax(x, 1))
    codes = encode_e4m3(x * tl.div_rn(1.0, scale)[:, None], NATIVE)
    return decode_e4m3(codes, NATIVE) * scale[:, None]
