"""context_gather in Triton: entries of one request, read through its pages and dequantised.

In:  a pool of a plain, fp8_ds_mla or index_k layout, the request's pages [P] int32, a host span.
Out: [length, D] in the layout's computed dtype; exact copies, or codes times powers of two.
Bytes: layout_rows.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, PagedPool
from gnomon.attention.providers.triton.language import padded, round_to
from gnomon.attention.providers.triton.layout_rows import (
    PoolView,
    load_index_keys,
    load_latent,
    load_latent_rope,
    token_at,
)

TOKENS_BLOCK = 8
NUMBERS_BLOCK = 2048


@triton.jit
def slots_of(pages, start, entry, PAGE: tl.constexpr, is_there):
    """Slots of a request's entries start + ``entry``, through its pages."""
    position = start + entry
    page = tl.load(pages + position // PAGE, mask=is_there, other=0).to(tl.int64)
    return page * PAGE + position % PAGE


@triton.jit(do_not_specialize=["start", "length"], do_not_specialize_on_alignment=["pages"])
def gather_plain_kernel(
    pool,
    pages,
    out,
    start,
    length,
    stride,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK numbers of the result, whichever entries they belong to."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry, column = at // D, at % D
    is_there = entry < length
    slot = slots_of(pages, start, entry, PAGE, is_there)
    value = tl.load(token_at(pool, slot, stride, PAGE, D) + column, mask=is_there)
    if pool.dtype.element_ty != out.dtype.element_ty:
        value = round_to(value.to(tl.float32), out.dtype.element_ty)
    tl.store(out + at, value, mask=is_there)


@triton.jit(do_not_specialize=["start", "length"], do_not_specialize_on_alignment=["pages"])
def gather_latent_kernel(
    pool,
    pages,
    out,
    start,
    length,
    stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """TOKENS_BLOCK entries."""
    entry = tl.program_id(0).to(tl.int64) * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)
    is_there = entry < length
    slot = slots_of(pages, start, entry, PAGE, is_there)
    token = token_at(pool, slot, stride, PAGE, WIDTH)
    latent = load_latent(token, is_there, RANK, GROUP, GROUPS_BLOCK, GROUP_BLOCK, NATIVE)
    group = tl.arange(0, GROUPS_BLOCK)[None, :, None]
    within = tl.arange(0, GROUP_BLOCK)[None, None, :]
    inside = is_there[:, None, None] & (within < GROUP) & (group * GROUP < RANK)
    place = (out + entry * (RANK + ROPE))[:, None, None] + group * GROUP + within
    tl.store(place, round_to(latent, out.dtype.element_ty), mask=inside)
    if ROPE > 0:
        rope = load_latent_rope(token, is_there, RANK, GROUP, ROPE, ROPE_BLOCK)
        column = tl.arange(0, ROPE_BLOCK)[None, :]
        place = (out + entry * (RANK + ROPE) + RANK)[:, None] + column
        inside = is_there[:, None] & (column < ROPE)
        tl.store(place, round_to(rope, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["start", "length"], do_not_specialize_on_alignment=["pages"])
def gather_index_keys_kernel(
    pool,
    pages,
    out,
    start,
    length,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """TOKENS_BLOCK index keys."""
    entry = tl.program_id(0).to(tl.int64) * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)
    is_there = entry < length
    slot = slots_of(pages, start, entry, PAGE, is_there)
    keys = load_index_keys(pool, slot, is_there, stride, PAGE, DIM, BLOCK, NATIVE)
    column = tl.arange(0, BLOCK)[None, :]
    place = (out + entry * DIM)[:, None] + column
    inside = is_there[:, None] & (column < DIM)
    tl.store(place, round_to(keys, out.dtype.element_ty), mask=inside)


def context_gather(pool: PagedPool, pages: Tensor, start: int, length: int) -> Tensor:
    """Entries start .. start + length − 1 of the request that owns ``pages`` [P].

    Raises LayoutError where the pages do not reach that far.
    """
    pool.pages_of_range(pages, start, length)
    layout, view = pool.layout, PoolView.of(pool)
    out = torch.empty((length, layout.dim), dtype=layout.computed_dtype, device=pool.device)
    given = (view.data, pages.contiguous(), out, start, length, view.stride)
    if not length:
        return out
    if isinstance(layout, Fp8LatentLayout):
        gather_latent_kernel[(triton.cdiv(length, TOKENS_BLOCK),)](
            *given,
            layout.latent_dim,
            layout.rope_dim,
            view.group,
            padded(layout.num_groups),
            padded(view.group),
            padded(layout.rope_dim),
            view.page_size,
            view.width,
            TOKENS_BLOCK,
            view.is_native,
        )
    elif isinstance(layout, Fp8IndexKeyLayout):
        block = 4 * TOKENS_BLOCK
        gather_index_keys_kernel[(triton.cdiv(length, block),)](
            *given, view.width, padded(view.width), view.page_size, block, view.is_native
        )
    else:
        gather_plain_kernel[(triton.cdiv(length * layout.dim, NUMBERS_BLOCK),)](
            *given, layout.dim, view.page_size, NUMBERS_BLOCK
        )
    return out
