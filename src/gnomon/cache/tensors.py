"""The bytes of the cache: one pool per part, and the page operations that act on a whole group.

In:  a `CacheSchema`, the number of pages of each group (the null page included), a device.
Out: `CacheTensors`; `pool(part)` is what attention operators read and write through layouts.
Banks: a group whose rollback keeps banks has `num_pages * num_banks` physical pages in its pools,
     bank b of page p at `p * num_banks + b`; page operations act on all banks of a page.
Poison: every byte 0xFF. That is NaN as e4m3, bfloat16, float16, float32 and float64 alike, so
     whatever is read from a poisoned page shows, in scales and rope columns too.
Not here: which pages are free or shared (pages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from gnomon.attention.layouts import PagedPool
from gnomon.cache.free_memory import free_memory_bytes
from gnomon.cache.schema import CacheSchema
from gnomon.errors import ConfigError, LayoutError

POISON_BYTE = 0xFF


class CacheTensors:
    """Owner of the cache's memory. All pages are zero at birth."""

    def __init__(
        self,
        schema: CacheSchema,
        num_pages: Mapping[str, int],
        device: torch.device | str = "cpu",
        free_bytes: int | None = None,
    ) -> None:
        """`num_pages`: group -> pages, the null page included. `free_bytes`: None asks the device.

        ConfigError if a group's count is missing or below 2, or if the memory is not there.
        """
        self.schema = schema
        self.device = torch.device(device)
        self.num_pages: Mapping[str, int] = MappingProxyType(dict(num_pages))
        self._check_counts()
        self.num_bytes = sum(
            schema.bytes_per_page(name) * count for name, count in num_pages.items()
        )
        free = free_memory_bytes(self.device) if free_bytes is None else free_bytes
        if free is not None and self.num_bytes > free:
            raise self._lacking(f"{free} bytes are free")
        try:
            pools = self._allocate()
        except (RuntimeError, MemoryError, ValueError) as error:
            raise self._lacking(str(error).splitlines()[0]) from error
        self.pools: Mapping[str, PagedPool] = MappingProxyType(pools)

    def _check_counts(self) -> None:
        known = {group.name for group in self.schema.groups}
        if set(self.num_pages) != known:
            raise ConfigError(
                f"page counts are needed for the cache groups {sorted(known)}; got "
                f"{sorted(self.num_pages)}."
            )
        for name, count in self.num_pages.items():
            if count < 2:
                raise ConfigError(
                    f"cache group {name!r} needs at least 2 pages (page 0 is the null page); got "
                    f"{count}. Raise --kv-cache-memory or --num-kv-pages."
                )

    def _lacking(self, found: str) -> ConfigError:
        groups = ", ".join(
            f"{name}: {count} pages of {self.schema.bytes_per_page(name)} bytes"
            for name, count in self.num_pages.items()
        )
        return ConfigError(
            f"the cache needs {self.num_bytes} bytes on {self.device} ({groups}), but {found}. "
            f"Lower --kv-cache-memory, --num-kv-pages or --max-model-len, or choose a smaller "
            f"--kv-layout."
        )

    def _allocate(self) -> dict[str, PagedPool]:
        pools = {}
        for group in self.schema.groups:
            count = self.num_pages[group.name] * group.num_banks
            for part in group.parts:
                pools[part.name] = part.layout.allocate(count, group.page_size, self.device)
        return pools

    def pool(self, part: str) -> PagedPool:
        """The pool of a part, for example "layers.3.latent"."""
        try:
            return self.pools[part]
        except KeyError:
            raise ConfigError(
                f"no cache part {part!r}; this model has {', '.join(self.pools)}."
            ) from None

    def copy_pages(self, group: str, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy page sources[i] to destinations[i] in every part and bank, as if all at once."""
        if len(sources) != len(destinations) or len(set(destinations)) != len(destinations):
            raise LayoutError(
                f"copy_pages needs as many sources as destinations, and no destination twice; "
                f"got {len(sources)} sources, destinations {list(destinations)}."
            )
        if 0 in destinations:
            raise LayoutError("copy_pages would write the null page 0, which belongs to nobody.")
        read, written = self._physical(group, sources), self._physical(group, destinations)
        for storage in self._storages(group):
            storage.index_copy_(0, written, storage.index_select(0, read))

    def zero_pages(self, group: str, pages: Sequence[int]) -> None:
        """Fill pages with zeros in every part and bank."""
        self._fill(group, pages, 0)

    def poison(self, group: str, pages: Sequence[int]) -> None:
        """Fill pages with NaN in every part and bank (checked mode: pages nobody may read)."""
        self._fill(group, pages, POISON_BYTE)

    def _fill(self, group: str, pages: Sequence[int], byte: int) -> None:
        written = self._physical(group, pages)
        for storage in self._storages(group):
            storage.index_fill_(0, written, byte)

    def _storages(self, group: str) -> list[Tensor]:
        return [self.pools[part.name].storage for part in self.schema.group(group).parts]

    def _physical(self, group: str, pages: Sequence[int]) -> Tensor:
        """Physical pages, all banks, of `pages`; LayoutError if one is not of the group."""
        num_banks = self.schema.group(group).num_banks
        count = self.num_pages[group]
        strangers = [page for page in pages if not 0 <= page < count]
        if strangers:
            raise LayoutError(f"cache group {group!r} has pages 0 .. {count - 1}; got {strangers}.")
        first = torch.tensor(list(pages), dtype=torch.int64) * num_banks
        banks = torch.arange(num_banks)
        return (first[:, None] + banks).flatten().to(self.device)
