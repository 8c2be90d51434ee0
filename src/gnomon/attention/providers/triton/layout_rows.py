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
    e4m3_exponent,
    encode_e4m3,
    finite_amax,
    from_exponent,
    has_native_fp8,
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
def latent_exponent(amax):
    """Exponent of the scale of a group of latents (fp8_ds_mla): at least that of 2^-13 >= 1e-4."""
    return tl.maximum(e4m3_exponent(amax), 114)


@triton.jit
def index_exponent(amax):
    """Exponent of the scale of an index key or query (index_k)."""
    return e4m3_exponent(tl.maximum(amax, 1e-4))


@triton.jit
def inverse_of(exponent):
    """1 / 2^(exponent − 127), exactly."""
    return from_exponent(254 - exponent)


@triton.jit
def pack_latent(
    token,
    latent,
    is_there,
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes of packed tokens' latents, fp32 [N, groups, columns]; stores their scales.

    ``token`` [N]: addresses of their first bytes, where the codes go. Groups from RANK / GROUP on
    and columns from GROUP on are padding, of zeros.
    """
    exponent = latent_exponent(finite_amax(latent, 2))
    number = tl.arange(0, latent.shape[1])[None, :]
    scales = (token + RANK).to(tl.pointer_type(tl.float32))[:, None] + number
    known = is_there[:, None] & (number * GROUP < RANK)
    tl.store(scales, from_exponent(exponent), mask=known)
    return encode_e4m3(latent * inverse_of(exponent)[:, :, None], NATIVE)


@triton.jit
def store_latent_rope(
    token, rope, is_there, RANK: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr
):
    """Store packed tokens' rope parts: fp32 [N, columns], padded; kept as bf16."""
    column = tl.arange(0, rope.shape[1])[None, :]
    place = (token + (RANK + RANK // GROUP * 4)).to(tl.pointer_type(tl.bfloat16))
    inside = is_there[:, None] & (column < ROPE)
    tl.store(place[:, None] + column, round_to(rope, tl.bfloat16), mask=inside)


@triton.jit
def clear_empty_rope(token, is_there, RANK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the rope slots of packed tokens that have no rope; BLOCK: their bf16 numbers."""
    place = (token + (RANK + RANK // GROUP * 4)).to(tl.pointer_type(tl.int16))
    at = place[:, None] + tl.arange(0, BLOCK)[None, :]
    tl.store(at, tl.zeros([token.shape[0], BLOCK], tl.int16), mask=is_there[:, None])


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
    exponent = index_exponent(finite_amax(keys, 1))
    codes = encode_e4m3(keys * inverse_of(exponent)[:, None], NATIVE)
    token = token_at(pool, slot, stride, PAGE, DIM)
    tl.store(token[:, None] + column, codes, mask=is_there[:, None] & (column < DIM))
    scales = index_scales_at(pool, slot, stride, PAGE, DIM)
    tl.store(scales, from_exponent(exponent), mask=is_there)


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
    exponent = index_exponent(finite_amax(x, 1))
    codes = encode_e4m3(x * inverse_of(exponent)[:, None], NATIVE)
    return decode_e4m3(codes, NATIVE) * from_exponent(exponent)[:, None]
