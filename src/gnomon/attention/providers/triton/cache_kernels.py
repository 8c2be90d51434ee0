"""The launches of latent_write and index_prepare: which program does what.

In:  whole arrays, strides, constants (cache.py makes them). Out: bytes of pools, turned queries.
What a program does is in cache_device.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.cache_device import (
    turn_index_queries,
    write_index_keys,
    write_latents,
)


@triton.jit(do_not_specialize=["num_rows"])
def latent_write_kernel(
    kv,
    weight,
    cos,
    sin,
    slots,
    pool,
    num_rows,
    kv_stride,
    pool_stride,
    eps,
    ROWS_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """ROWS_BLOCK rows a program."""
    write_latents(
        tl.program_id(0) * ROWS_BLOCK,
        num_rows,
        kv,
        weight,
        cos,
        sin,
        slots,
        pool,
        kv_stride,
        pool_stride,
        eps,
        ROWS_BLOCK,
        RANK,
        ROPE,
        GROUP,
        GROUPS_BLOCK,
        GROUP_BLOCK,
        ROPE_BLOCK,
        IS_INTERLEAVED,
        PAGE,
        WIDTH,
        IS_PACKED,
        NATIVE,
    )


@triton.jit(do_not_specialize=["num_rows", "key_programs"])
def index_prepare_kernel(
    q,
    k,
    weight,
    bias,
    q_cos,
    q_sin,
    k_cos,
    k_sin,
    slots,
    pool,
    out,
    num_rows,
    key_programs,
    q_stride,
    head_stride,
    k_stride,
    pool_stride,
    eps,
    HEADS: tl.constexpr,
    DI: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_HADAMARD: tl.constexpr,
    SCALE: tl.constexpr,
    IS_Q_INTERLEAVED: tl.constexpr,
    IS_K_INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    IS_PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The first ``key_programs`` programs write keys, the others turn heads of queries."""
    program = tl.program_id(0)
    if program < key_programs:
        write_index_keys(
            program * KEYS_BLOCK,
            num_rows,
            k,
            weight,
            bias,
            k_cos,
            k_sin,
            slots,
            pool,
            k_stride,
            pool_stride,
            eps,
            KEYS_BLOCK,
            DI,
            DIM,
            BLOCK,
            HAS_HADAMARD,
            SCALE,
            IS_K_INTERLEAVED,
            PAGE,
            IS_PACKED,
            NATIVE,
        )
    else:
        PARTS: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
        part = program - key_programs
        turn_index_queries(
            (part // PARTS).to(tl.int64),
            (part % PARTS) * HEADS_BLOCK,
            q,
            q_cos,
            q_sin,
            out,
            q_stride,
            head_stride,
            HEADS,
            DI,
            DIM,
            HEADS_BLOCK,
            BLOCK,
            HAS_HADAMARD,
            SCALE,
            IS_Q_INTERLEAVED,
            IS_PACKED,
            NATIVE,
        )
