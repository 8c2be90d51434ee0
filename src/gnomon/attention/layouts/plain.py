"""Plain layouts: a token is D numbers of one float dtype, side by side ("bf16_576", "fp32_80").

In:  values [N, D]; they are rounded to the stored dtype (nearest, ties to even), never scaled.
Out: the stored numbers, cast to the computed dtype (by default the stored one: no cast).
Latents are the concatenation [c (kv_lora_rank) | k_rope (qk_rope_head_dim)]; a NoPE model stores c
     alone ("bf16_512"); index keys are D = index_head_dim. NaN and infinities pass unchanged.
Fast path: the pool is seen as a table of numbers and rows are moved by index_select / index_copy;
     no bytes are shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gnomon.attention.layouts.base import HOST_OPERATIONS, KVLayout, Operation, PagedPool
from gnomon.attention.layouts.float8 import typed_columns
from gnomon.attention.layouts.operations import DEVICE_OPERATIONS
from gnomon.attention.layouts.rows import put_rows, take_rows
from gnomon.errors import LayoutError

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True, slots=True)
class PlainLayout(KVLayout):
    """D = `num_columns` numbers of `dtype` per token; read as `read_dtype` (None: as stored)."""

    dtype: torch.dtype
    num_columns: int
    read_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            allowed = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
            raise LayoutError(f"a plain layout stores one of {allowed}; got {self.dtype}.")
        if self.num_columns < 1:
            raise LayoutError(f"a plain layout has at least 1 column; got {self.num_columns}.")

    @property
    def id(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]}_{self.num_columns}"

    @property
    def version(self) -> int:
        return 1

    @property
    def dim(self) -> int:
        return self.num_columns

    @property
    def plane_widths(self) -> tuple[int, ...]:
        return (self.num_columns * self.dtype.itemsize,)

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def computed_dtype(self) -> torch.dtype:
        return self.read_dtype or self.dtype

    @property
    def alignment(self) -> int:
        return self.dtype.itemsize

    @property
    def operations(self) -> frozenset[Operation]:
        on_device = DEVICE_OPERATIONS if self.dtype != torch.float64 else frozenset()
        return HOST_OPERATIONS | on_device | {Operation.TYPED_VIEW}

    def computing_in(self, dtype: torch.dtype) -> Self:
        return replace(self, read_dtype=dtype)

    def quantise(self, values: Tensor) -> Tensor:
        self.check_values(values)
        return values.to(self.dtype).contiguous().view(torch.uint8)

    def dequantise(self, rows: Tensor) -> Tensor:
        self.check_rows(rows)
        typed = typed_columns(rows, 0, self.bytes_per_token, self.dtype)
        return typed.to(self.computed_dtype, copy=True)

    def pool_of(self, entries: Tensor, page_size: int) -> PagedPool:
        """A pool that is ``entries`` [pages * page_size, D]: contiguous, of the layout's dtype.

        Nothing is copied. Raises LayoutError for entries that are not whole pages of this layout.
        """
        whole_pages = entries.ndim == 2 and entries.shape[0] % page_size == 0
        is_own = entries.dtype == self.dtype and entries.shape[-1] == self.dim
        if not (whole_pages and is_own and entries.is_contiguous()):
            raise LayoutError(
                f"a pool of {self.id} is made of contiguous entries [pages * {page_size}, "
                f"{self.dim}] of {self.dtype}; got {tuple(entries.shape)} of {entries.dtype}."
            )
        storage = entries.view(torch.uint8).view(-1, self.page_bytes(page_size))
        return PagedPool(self, storage, page_size)

    def write(self, pool: PagedPool, slots: Tensor, values: Tensor) -> None:
        self.require(pool)
        self.check_write(slots, values)
        put_rows(pool.typed_pages(), slots, values.to(self.dtype))

    def gather(self, pool: PagedPool, slots: Tensor) -> Tensor:
        self.require(pool)
        return take_rows(pool.typed_pages(), slots).to(self.computed_dtype)

    def gather_range(self, pool: PagedPool, pages: Tensor, start: int, length: int) -> Tensor:
        self.require(pool)
        whole, first = pool.pages_of_range(pages, start, length)
        rows = pool.typed_pages().index_select(0, whole).flatten(0, 1)
        return rows.narrow(0, first, length).to(self.computed_dtype)

    def round_trip_bound(self, values: Tensor) -> Tensor:
        info = torch.finfo(self.dtype)
        if values.dtype == self.dtype:
            return torch.zeros_like(values, dtype=torch.float64)
        # Half a unit in the last place, or half the smallest subnormal.
        return (values.double().abs() * (info.eps / 2)).clamp_min(
            info.smallest_normal * info.eps / 2
        )
