"""What a cache format is: `KVLayout`, the only code that touches cache bytes.

In:  values [N, D] with the slots they go to; or slots, or a span of a request's pages, to read.
Out: values [..., D] in the layout's computed dtype.
Byte map: a layout is a tuple of plane widths. A page holds all tokens of plane 0, then all tokens
     of plane 1, and so on; `bytes_per_token` is their sum. One plane = token rows side by side.
Slots: physical places `page * page_size + offset`; slot < 0 writes nothing and reads as zeros
     (in every layout a token of zero bytes decodes to zeros). Page 0 is the null page: the pool
     treats it as any other, and no request is ever given it.
Not here: which slots belong to a request (geometry), which pages are free (cache.pages).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.layouts.operations import HOST_OPERATIONS, Operation
from gnomon.attention.layouts.pool import PagedPool
from gnomon.attention.layouts.rows import put_rows, take_rows
from gnomon.errors import LayoutError

__all__ = ["HOST_OPERATIONS", "KVLayout", "Operation", "PagedPool"]


class KVLayout(ABC):
    """A named, versioned cache format. A value: two layouts of one format are equal."""

    __slots__ = ()

    @property
    @abstractmethod
    def id(self) -> str:
        """The name that flags, logs and errors use, for example "fp8_ds_mla_656"."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Grows whenever the meaning of the bytes changes, be it only the rule for the scales."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """D: numbers per token that go in and come out."""

    @property
    @abstractmethod
    def plane_widths(self) -> tuple[int, ...]:
        """Bytes per token in each plane of a page, in page order."""

    @property
    @abstractmethod
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the bulk of the stored numbers."""

    @property
    @abstractmethod
    def computed_dtype(self) -> torch.dtype:
        """The dtype that reads return."""

    @property
    @abstractmethod
    def alignment(self) -> int:
        """Page strides and the pool's address are multiples of this many bytes."""

    @property
    @abstractmethod
    def operations(self) -> frozenset[Operation]:
        """The operations that this layout owns."""

    @abstractmethod
    def computing_in(self, dtype: torch.dtype) -> Self:
        """The same bytes, read as `dtype`."""

    @abstractmethod
    def quantise(self, values: Tensor) -> Tensor:
        """Encode values [..., D] of any float dtype as uint8 [..., bytes_per_token].

        The planes of a token stand side by side, in page order.
        """

    @abstractmethod
    def dequantise(self, rows: Tensor) -> Tensor:
        """Decode uint8 [..., bytes_per_token], planes side by side, into values [..., D]."""

    @abstractmethod
    def round_trip_bound(self, values: Tensor) -> Tensor:
        """Largest |dequantise(quantise(x)) - x| that the format allows, per element, in float64.

        Holds for finite values within the range of the stored dtype and a read in float32 or
        wider; a narrower computed dtype adds its own rounding.
        """

    @property
    def rounds_queries(self) -> bool:
        """Whether index queries scored against this part are rounded as its entries are."""
        return False

    def round_queries(self, queries: Tensor) -> Tensor:
        """Index queries [..., D] as they are scored: through the format if `rounds_queries`.

        Rounding a second time changes nothing: the values are codes times a power of two.
        """
        if not self.rounds_queries:
            return queries
        return self.dequantise(self.quantise(queries)).to(queries.dtype)

    @property
    def versioned_id(self) -> str:
        """The id that hashes and stored pages carry: equal iff the bytes mean the same."""
        return f"{self.id}.v{self.version}"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all planes."""
        return sum(self.plane_widths)

    def page_bytes(self, page_size: int) -> int:
        """Bytes that a page of `page_size` tokens needs; a page stride may be larger."""
        return page_size * self.bytes_per_token

    def allocate(
        self,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        page_stride_bytes: int | None = None,
    ) -> PagedPool:
        """A zeroed pool of `num_pages` pages, the null page included.

        On the CPU the system gives the memory when a page is first written.
        """
        stride = self.page_bytes(page_size) if page_stride_bytes is None else page_stride_bytes
        if torch.device(device).type == "cpu":
            # torch.zeros would write every page now; numpy leaves the zeroing to the system.
            storage = torch.from_numpy(np.zeros((num_pages, stride), dtype=np.uint8))
        else:
            storage = torch.zeros((num_pages, stride), dtype=torch.uint8, device=device)
        return PagedPool(self, storage, page_size)

    def require(self, pool: PagedPool) -> None:
        """Raise LayoutError unless the bytes of `pool` are of this format."""
        held = pool.layout
        if held is not self and held.versioned_id != self.versioned_id:
            raise LayoutError(
                f"pool holds {held.versioned_id}, but it is read or written as "
                f"{self.versioned_id}. Use pool.layout, the one that made the pool."
            )

    def write(self, pool: PagedPool, slots: Tensor, values: Tensor) -> None:
        """Put values [N, D] at slots [N] (int64 or int32; < 0 writes nothing; no slot twice)."""
        self.require(pool)
        self.check_write(slots, values)
        rows = self.quantise(values)
        begin = 0
        for plane, width in zip(pool.planes, self.plane_widths, strict=True):
            put_rows(plane, slots, rows.narrow(-1, begin, width))
            begin += width

    def gather(self, pool: PagedPool, slots: Tensor) -> Tensor:
        """Read slots [...] (int64 or int32) as values [..., D]; zeros where slot < 0."""
        return self.dequantise(self.gather_bytes(pool, slots))

    def gather_range(self, pool: PagedPool, pages: Tensor, start: int, length: int) -> Tensor:
        """Entries start .. start+length-1 of a request whose pages are `pages` [N] -> [length, D].

        `start` may lie in the middle of a page.
        """
        return self.dequantise(self.gather_range_bytes(pool, pages, start, length))

    def gather_bytes(self, pool: PagedPool, slots: Tensor) -> Tensor:
        """Read slots [...] as uint8 [..., bytes_per_token], planes side by side; 0 at slot < 0."""
        self.require(pool)
        parts = [take_rows(plane, slots) for plane in pool.planes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def gather_range_bytes(self, pool: PagedPool, pages: Tensor, start: int, length: int) -> Tensor:
        """Like gather_range, undecoded: uint8 [length, bytes_per_token]."""
        self.require(pool)
        whole, first = pool.pages_of_range(pages, start, length)
        parts = [
            plane.index_select(0, whole).flatten(0, 1).narrow(0, first, length)
            for plane in pool.planes
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def check_write(self, slots: Tensor, values: Tensor) -> None:
        """Raise LayoutError unless values are floats [N, D] and slots [N]."""
        if slots.ndim != 1 or values.shape != (slots.shape[0], self.dim):
            raise LayoutError(
                f"{self.id} writes values [N, {self.dim}] at slots [N]; got values "
                f"{tuple(values.shape)} and slots {tuple(slots.shape)}."
            )
        self.check_values(values)

    def check_values(self, values: Tensor) -> None:
        """Raise LayoutError unless values are floats [..., D]."""
        if values.shape[-1:] != (self.dim,) or not values.is_floating_point():
            raise LayoutError(
                f"{self.id} encodes floats [..., {self.dim}]; got {values.dtype} "
                f"{tuple(values.shape)}."
            )

    def check_rows(self, rows: Tensor) -> None:
        """Raise LayoutError unless rows are uint8 [..., bytes_per_token]."""
        if rows.shape[-1:] != (self.bytes_per_token,) or rows.dtype != torch.uint8:
            raise LayoutError(
                f"{self.id} decodes uint8 [..., {self.bytes_per_token}]; got {rows.dtype} "
                f"{tuple(rows.shape)}."
            )
