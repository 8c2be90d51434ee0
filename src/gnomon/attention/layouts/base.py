"""What a cache format is (`KVLayout`) and the bytes that are kept in one (`PagedPool`).

In:  values [N, D] with the slots they go to; or slots, or a span of a request's pages, to read.
Out: values [..., D] in the layout's computed dtype. Nothing but a layout touches cache bytes.
Byte map: a layout is a tuple of plane widths. A page holds all tokens of plane 0, then all tokens
     of plane 1, and so on; `bytes_per_token` is their sum. One plane = token rows side by side.
Slots: physical places `page * page_size + offset`; slot < 0 writes nothing and reads as zeros
     (in every layout a token of zero bytes decodes to zeros). Page 0 is the null page: the pool
     treats it as any other, and no request is ever given it.
Not here: which slots belong to a request (geometry), which pages are free (cache.pages).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor

from gnomon.attention.layouts.rows import put_rows, take_rows
from gnomon.errors import LayoutError


class Operation(StrEnum):
    """What a layout can be asked to do; one that lacks it cannot be chosen where it is needed."""

    WRITE = "write"
    GATHER = "gather"
    GATHER_RANGE = "gather_range"
    QUANTISE = "quantise"
    DEQUANTISE = "dequantise"
    TYPED_VIEW = "typed_view"  # the pool seen as a [slots, D] tensor, no bytes moved
    DEVICE_LOAD = "device_load"  # a Triton function that fused kernels inline to load a token
    DEVICE_STORE = "device_store"  # likewise, to store one


HOST_OPERATIONS = frozenset(
    {
        Operation.WRITE,
        Operation.GATHER,
        Operation.GATHER_RANGE,
        Operation.QUANTISE,
        Operation.DEQUANTISE,
    }
)


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
        """A zeroed pool of `num_pages` pages, the null page included."""
        stride = self.page_bytes(page_size) if page_stride_bytes is None else page_stride_bytes
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


@dataclass(frozen=True, slots=True, eq=False)
class PagedPool:
    """Pages of one part of the cache: storage and the layout that gives its bytes a meaning.

    `storage` is uint8 [num_pages, >= page_bytes]; its first stride is the page stride and may
    exceed a row (a pool can be a slice of a larger buffer). Two pools are equal if they are one.
    """

    layout: KVLayout
    storage: Tensor
    page_size: int
    # uint8 [num_pages, page_size, width] views, one per plane of the layout.
    planes: tuple[Tensor, ...] = field(init=False, repr=False)
    _typed_pages: Tensor | None = field(init=False, repr=False)
    _typed: Tensor | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()
        planes = []
        begin = 0
        for width in self.layout.plane_widths:
            end = begin + width * self.page_size
            planes.append(self.storage[:, begin:end].view(-1, self.page_size, width))
            begin = end
        typed_pages = typed = None
        if Operation.TYPED_VIEW in self.layout.operations:
            typed_pages = planes[0].view(self.layout.stored_dtype)
            if self.is_contiguous:
                typed = typed_pages.view(self.num_slots, self.layout.dim)
        object.__setattr__(self, "planes", tuple(planes))
        object.__setattr__(self, "_typed_pages", typed_pages)
        object.__setattr__(self, "_typed", typed)

    def _check(self) -> None:
        storage, layout = self.storage, self.layout
        if self.page_size < 1:
            raise LayoutError(f"page_size must be at least 1 token; got {self.page_size}.")
        if storage.dtype != torch.uint8 or storage.ndim != 2 or storage.shape[0] < 1:
            raise LayoutError(
                f"a pool's storage is uint8 [num_pages >= 1, bytes]; got {storage.dtype} "
                f"{tuple(storage.shape)}."
            )
        need = layout.page_bytes(self.page_size)
        if storage.shape[1] < need or storage.stride(1) != 1:
            raise LayoutError(
                f"{layout.id} needs {need} adjoining bytes a page ({self.page_size} tokens of "
                f"{layout.bytes_per_token}); got rows of {storage.shape[1]} bytes with byte "
                f"stride {storage.stride(1)}."
            )
        if self.num_pages > 1 and self.page_stride_bytes < storage.shape[1]:
            raise LayoutError(
                f"pages overlap: page stride {self.page_stride_bytes} bytes, page row "
                f"{storage.shape[1]} bytes."
            )
        if self.page_stride_bytes % layout.alignment or storage.storage_offset() % layout.alignment:
            raise LayoutError(
                f"{layout.id} needs page strides and offsets in multiples of {layout.alignment} "
                f"bytes; got stride {self.page_stride_bytes}, offset {storage.storage_offset()}."
            )

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page included."""
        return self.storage.shape[0]

    @property
    def num_slots(self) -> int:
        """Slots in the pool: valid ids are 0 .. num_slots-1."""
        return self.storage.shape[0] * self.page_size

    @property
    def page_stride_bytes(self) -> int:
        """Distance from one page's first byte to the next one's."""
        return self.storage.stride(0)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.storage.device

    @property
    def is_contiguous(self) -> bool:
        """Whether pages follow each other without a gap."""
        page_bytes = self.layout.page_bytes(self.page_size)
        return self.num_pages == 1 or self.page_stride_bytes == page_bytes

    def typed(self) -> Tensor:
        """The pool as [num_slots, D] in the stored dtype, sharing its bytes; row number = slot."""
        if self._typed is None:
            raise LayoutError(
                f"no typed view: {self.layout.id} with page stride {self.page_stride_bytes} for "
                f"{self.layout.page_bytes(self.page_size)} bytes a page is not one table of "
                f"numbers. Plain layouts without a gap are; else use layout.gather."
            )
        return self._typed

    def typed_pages(self) -> Tensor:
        """The pool as [num_pages, page_size, D] in the stored dtype, sharing its bytes."""
        if self._typed_pages is None:
            raise LayoutError(
                f"no typed view: {self.layout.id} packs its bytes. Use layout.gather, or a plain "
                f"layout such as bf16_{self.layout.dim}."
            )
        return self._typed_pages

    def pages_of_range(self, pages: Tensor, start: int, length: int) -> tuple[Tensor, int]:
        """The pages that hold entries start .. start+length-1, and `start`'s place in the first."""
        if pages.ndim != 1 or start < 0 or length < 0:
            raise LayoutError(
                f"a range needs pages [N], start >= 0 and length >= 0; got pages "
                f"{tuple(pages.shape)}, start {start}, length {length}."
            )
        if start + length > pages.shape[0] * self.page_size:
            raise LayoutError(
                f"entries {start} .. {start + length - 1} pass the end of {pages.shape[0]} pages "
                f"of {self.page_size}. Give all pages that the request owns up to there."
            )
        begin = start // self.page_size
        end = -(-(start + length) // self.page_size)
        return pages[begin:end], start - begin * self.page_size
