"""Operators that write and read the cache in Triton: latent_write, index_prepare, context_gather.

In:  raw latents, index queries and keys on their rows, slots (−1 writes nothing), pools of plain,
     fp8_ds_mla and index_k layouts. Out: bytes of pools, turned queries, gathered entries.
Each is one launch. A row's bits depend on that row alone. Maths: oracle_math.md §1.2–1.5; bytes:
layout_rows.py. Not here: the launch that joins them (prepare.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from gnomon.attention.layouts import PagedPool
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.providers.triton.cache_gather import context_gather
from gnomon.attention.providers.triton.cache_kernels import (
    index_prepare_kernel,
    latent_write_kernel,
)
from gnomon.attention.providers.triton.language import UNFUSED, padded
from gnomon.attention.providers.triton.layout_rows import PoolView
from gnomon.attention.providers.triton.rows import heads_of


@dataclass(frozen=True, slots=True)
class RowsTile:
    """What a program does at once: rows of latents, of index keys, index heads of one row.

    Where they pass through a dot (Hadamard), 16 keys and 16 heads. ``turned``: attention heads of
    one row. One tile for every number of rows: a row's bits hang on the tile.
    """

    latents: int
    keys: int
    heads: int
    turned: int
    num_warps: int


TILE = RowsTile(latents=4, keys=4, heads=32, turned=32, num_warps=4)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Constants of a latent write, in the order of the kernel's arguments from ROWS_BLOCK on."""

    rows: int
    rank: int
    rope: int
    view: PoolView
    is_interleaved: bool

    def constants(self) -> tuple[int | bool, ...]:
        """ROWS_BLOCK .. NATIVE."""
        view = self.view
        group = view.group or self.rank
        groups = padded(self.rank // group)
        blocks = (group, groups, padded(group), padded(self.rope))
        store = (view.page_size, view.width, view.is_packed, view.is_native)
        return (self.rows, self.rank, self.rope, *blocks, self.is_interleaved, *store)


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Constants of an index preparation, in the order of the kernel's arguments from HEADS on."""

    tile: RowsTile
    num_heads: int
    dim: int
    rope: int
    has_hadamard: bool
    view: PoolView
    are_interleaved: tuple[bool, bool]

    @property
    def keys_block(self) -> int:
        """Keys a program writes: a dot needs 16 rows."""
        return 16 if self.has_hadamard else self.tile.keys

    @property
    def heads_block(self) -> int:
        """Heads a program turns."""
        return 16 if self.has_hadamard else padded(min(self.num_heads, self.tile.heads))

    @property
    def heads_programs(self) -> int:
        """Programs for the heads of one row."""
        return -(-self.num_heads // self.heads_block)

    def constants(self) -> tuple[int | bool | float, ...]:
        """HEADS .. NATIVE."""
        view, block = self.view, padded(self.dim, 16 if self.has_hadamard else 1)
        widths = (self.num_heads, self.dim, self.rope, self.heads_block, self.keys_block, block)
        turn = (self.has_hadamard, self.dim**-0.5, *self.are_interleaved)
        return (*widths, *turn, view.page_size, view.is_packed, view.is_native)


def latent_write(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rows: RopeRows,
    pool: PagedPool,
    slots: Tensor,
    tile: RowsTile = TILE,
) -> None:
    """Write [rms_norm(c) | rope(kr)] of kv [N, D_c + D_r] at slots [N]."""
    if not kv.shape[0]:
        return
    kv, view = with_neighbours(kv), PoolView.of(pool)
    shape = LatentShape(tile.latents, norm_weight.shape[0], rows.dim, view, rows.is_interleaved)
    latent_write_kernel[(triton.cdiv(kv.shape[0], tile.latents),)](
        kv,
        norm_weight,
        rows.cos,
        rows.sin,
        slots,
        view.data,
        kv.shape[0],
        kv.stride(0),
        view.stride,
        eps,
        *shape.constants(),
        num_warps=tile.num_warps,
        **UNFUSED,
    )


def index_prepare(
    q: Tensor,
    k: Tensor,
    transform: IndexTransform,
    rows: tuple[RopeRows, RopeRows],
    pool: PagedPool,
    slots: Tensor,
    tile: RowsTile = TILE,
) -> Tensor:
    """Norm the keys k [N, Di], rotate (and Hadamard) both, write the keys, return the queries."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    heads, k, view = heads_of(q) if q.numel() else q, with_neighbours(k), PoolView.of(pool)
    interleaved = (rows[0].is_interleaved, rows[1].is_interleaved)
    shape = IndexShape(
        tile, q.shape[1], q.shape[2], rows[0].dim, transform.has_hadamard, view, interleaved
    )
    key_programs = triton.cdiv(k.shape[0], shape.keys_block)
    programs = key_programs + q.shape[0] * shape.heads_programs
    if programs:
        index_prepare_kernel[(programs,)](
            heads,
            k,
            transform.norm_weight,
            transform.norm_bias,
            rows[0].cos,
            rows[0].sin,
            rows[1].cos,
            rows[1].sin,
            slots,
            view.data,
            out,
            k.shape[0],
            key_programs,
            heads.stride(0),
            heads.stride(1),
            k.stride(0),
            view.stride,
            transform.norm_eps,
            *shape.constants(),
            num_warps=tile.num_warps,
            **UNFUSED,
        )
    return out


def with_neighbours(x: Tensor) -> Tensor:
    """The rows of x [N, D] with neighbouring columns; copied only if it must be."""
    return x if x.stride(-1) == 1 else x.contiguous()


KERNELS: dict[str, Callable[..., Any]] = {
    "latent_write": latent_write,
    "index_prepare": index_prepare,
    "context_gather": context_gather,
}
