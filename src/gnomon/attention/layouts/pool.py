"""`PagedPool`: the bytes of one part of the cache, with the layout that gives them a meaning.

In:  storage, uint8 [num_pages, bytes], a layout and a page size.
Out: views of it, checked once at birth: planes of bytes, and numbers where the layout is plain.
Slots are `page * page_size + offset`; page 0 is the null page, which the pool treats as any other.
Not here: reading and writing tokens (base.py), owning or freeing pages (cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnomon.attention.layouts.operations import Operation
from gnomon.errors import LayoutError

if TYPE_CHECKING:
    from gnomon.attention.layouts.base import KVLayout


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
