"""Steps with filled latent pools for cases of single operators, and attention written out plainly.

In:  query and kv lengths, sizes, a layout, a page size, perhaps a page stride. Out: `OpCase`:
     geometry, pool, the numbers that the pool holds as float64 per request, random queries.
     `plain_attention` is the oracle: float64, one row at a time, no cache.
Not here: models (tiny.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.geometry import Geometry, RowTensor, build_geometry
from gnomon.attention.layouts import KVLayout, PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.operators import Operators
from gnomon.attention.providers import builtin_providers
from gnomon.attention.transforms import pad_rows

PROVIDERS = ("reference", "torch")


def operators(provider: str = "torch", dtype: torch.dtype = torch.float64) -> Operators:
    """All operators of one provider."""
    return bind_operators(OpNeed(dtype=dtype), builtin_providers(), provider)[0]


def watched(ops: Operators, watch: Callable[[str, tuple[Any, ...]], None]) -> Operators:
    """The same operators; ``watch(name, arguments)`` is called before each kernel."""

    def wrap(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            watch(name, args)
            return kernel(*args, **named)

        return call

    return Operators({name: wrap(name, kernel) for name, kernel in ops.kernels.items()})


def deal_pages(lengths: Sequence[int], page_size: int, seed: int = 0) -> list[list[int]]:
    """Shuffled pages from 1 on, enough for each length."""
    needs = [-(-length // page_size) for length in lengths]
    pages = list(range(1, sum(needs) + 1))
    random.Random(seed).shuffle(pages)
    return [[pages.pop() for _ in range(need)] for need in needs]


@dataclass
class OpCase:
    """``stored[b]`` float64 [kv_len, D]: what the pool holds for request b, read entry by entry."""

    geometry: Geometry
    pool: PagedPool
    stored: list[Tensor]
    q_latent: RowTensor
    q_rope: RowTensor
    rank: int

    def expected(self, keys: Mapping[int, Sequence[int]], scale: float) -> tuple[Tensor, Tensor]:
        """(out [R, H, D_c], lse [R, H]) ; row r attends positions ``keys[r]``, none: 0 and -inf."""
        query = torch.cat((self.q_latent.data, self.q_rope.data), -1).double()
        out = query.new_zeros(*query.shape[:2], self.rank)
        lse = query.new_full(query.shape[:2], -torch.inf)
        request, _ = self.geometry.rows.host_rows()
        for row, ids in keys.items():
            if len(ids):
                entries = self.stored[request[row]][list(ids)]
                out[row], lse[row] = plain_attention(query[row], entries, self.rank, scale)
        return out, lse

    def causal(self) -> dict[int, list[int]]:
        """Every live row's visible positions."""
        _, position = self.geometry.rows.host_rows()
        return {r: list(range(position[r] + 1)) for r in self.geometry.rows.host_live_rows()}


def plain_attention(
    query: Tensor, entries: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """One row: query [H, D], entries [n, D], values = the first ``rank`` columns."""
    logits = query @ entries.T * scale
    top = logits.amax(-1, keepdim=True)
    weight = (logits - top).exp()
    total = weight.sum(-1, keepdim=True)
    return weight @ entries[:, :rank] / total, (top + total.log())[:, 0]


@dataclass(frozen=True)
class Sizes:
    """What an op case is made of. ``layout`` None: plain numbers of ``dtype``."""

    rank: int = 32
    rope: int = 8
    heads: int = 4
    layout: KVLayout | None = None
    page_size: int = 4
    page_stride_bytes: int | None = None
    num_rows: int | None = None  # the step is padded to so many rows
    dtype: torch.dtype = torch.float64
    seed: int = 0


def op_case(query_lens: Sequence[int], kv_lens: Sequence[int], **sizes: Any) -> OpCase:
    """Random latents, written through the layout; ``sizes`` are fields of Sizes."""
    size = Sizes(**sizes)
    generator = torch.Generator().manual_seed(size.seed)
    pages = deal_pages(kv_lens, size.page_size, size.seed)
    geometry = build_geometry(query_lens, kv_lens, {"tokens": pages}, size.page_size)
    geometry = geometry if size.num_rows is None else pad_rows(geometry, size.num_rows)
    layout = size.layout or PlainLayout(size.dtype, size.rank + size.rope)
    num_pages = 1 + sum(map(len, pages))
    pool = layout.allocate(num_pages, size.page_size, page_stride_bytes=size.page_stride_bytes)
    stored = []
    for b, length in enumerate(kv_lens):
        slots = torch.tensor(
            [
                pages[b][p // size.page_size] * size.page_size + p % size.page_size
                for p in range(length)
            ],
            dtype=torch.int64,
        )
        values = torch.randn(length, layout.dim, generator=generator, dtype=torch.float64)
        layout.write(pool, slots, values.to(size.dtype))
        stored.append(layout.gather(pool, slots).double())

    def rows(*shape: int) -> RowTensor:
        data = torch.randn(geometry.rows.num_rows, *shape, generator=generator, dtype=size.dtype)
        return RowTensor(geometry.rows, data)

    latent, rope = rows(size.heads, size.rank), rows(size.heads, size.rope)
    return OpCase(geometry, pool, stored, latent, rope, size.rank)
