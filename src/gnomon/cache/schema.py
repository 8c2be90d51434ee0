"""What a model remembers: groups of parts, each part with its layout, each group with its rules.

In:  `PartSpec`s (one per layer and kind) gathered into `GroupSpec`s by the model.
Out: `CacheSchema`, a frozen value that the scheduler's page pool, the prefix index, the memory plan
     and `CacheTensors` are all built from.
Units: a page holds `page_size` entries, an entry stands for `tokens_per_entry` tokens. Share, move,
     evict, restore and commit act on all parts of a group together: a page id means the same span
     in every part.
Not here: bytes (tensors.py), free pages (pages.py), how many pages fit (budget.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace

from gnomon.attention.layouts import KVLayout
from gnomon.cache.rules import (
    Banks,
    Checkpoint,
    Overwrite,
    Paged,
    Private,
    Ring,
    Rollback,
    Sharing,
    Window,
    check_pair,
)
from gnomon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One table of the cache: `name` ("layers.3.latent"), its byte format, the layer it serves."""

    name: str
    layout: KVLayout
    layer: int


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Parts whose pages are given and taken together."""

    name: str
    parts: tuple[PartSpec, ...]
    page_size: int  # entries per page
    tokens_per_entry: int = 1
    sharing: Sharing = field(default_factory=Paged)
    rollback: Rollback = field(default_factory=Overwrite)

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError(f"cache group {self.name!r} has no parts; give it at least one.")
        if self.page_size < 1 or self.tokens_per_entry < 1:
            raise ConfigError(
                f"cache group {self.name!r}: page_size and tokens_per_entry must be at least 1; "
                f"got {self.page_size} and {self.tokens_per_entry}."
            )
        check_pair(self.name, self.sharing, self.rollback)
        if isinstance(self.sharing, Checkpoint) and self.tokens_per_entry != self.sharing.interval:
            raise ConfigError(
                f"cache group {self.name!r}: a checkpoint every {self.sharing.interval} tokens "
                f"is an entry per {self.sharing.interval} tokens; got tokens_per_entry "
                f"{self.tokens_per_entry}."
            )
        for part in self.parts:
            page_bytes, unit = part.layout.page_bytes(self.page_size), part.layout.alignment
            if page_bytes % unit:
                raise ConfigError(
                    f"cache part {part.name!r}: {part.layout.id} needs pages of a multiple of "
                    f"{unit} bytes; {self.page_size} entries are {page_bytes}. Choose an even "
                    f"page size (--block-size)."
                )

    @property
    def tokens_per_page(self) -> int:
        """Tokens that the entries of a page stand for."""
        return self.page_size * self.tokens_per_entry

    @property
    def num_banks(self) -> int:
        """Copies of every page that rollback needs; 1 unless it works by banks."""
        return self.rollback.num_banks if isinstance(self.rollback, Banks) else 1

    @property
    def ring_tokens(self) -> int:
        """Tokens (entries of a private group) of room beyond what is read; 0 without a ring."""
        return self.rollback.num_tokens if isinstance(self.rollback, Ring) else 0

    @property
    def is_per_request(self) -> bool:
        """Whether the need for pages follows the number of requests rather than of tokens."""
        return isinstance(self.sharing, Window | Private)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all parts and banks."""
        one_bank = sum(part.layout.page_bytes(self.page_size) for part in self.parts)
        return one_bank * self.num_banks

    def pages_for_request(self, num_tokens: int, num_step_tokens: int = 1) -> int:
        """Most pages that a request of `num_tokens` tokens holds, while it computes a step.

        A window holds, beside what the step's first row reads, the `num_step_tokens` of the step.
        """
        ring = self.ring_tokens
        match self.sharing:
            case Paged(lookahead):
                return -(-(num_tokens + lookahead) // self.tokens_per_page)
            case Window(window):
                kept = window + ring + num_step_tokens - 1
                # `kept` tokens can begin at the last entry of a page.
                most = (kept + self.tokens_per_page - 2) // self.tokens_per_page + 1
                return min(most, -(-(num_tokens + ring) // self.tokens_per_page))
            case Checkpoint(interval):
                return -(-(num_tokens // interval + 1) // self.page_size)
            case Private(num_entries):
                return -(-(num_entries + ring) // self.page_size)


@dataclass(frozen=True, slots=True)
class CacheSchema:
    """All groups of a model. Empty `revision`, `dtype`, `quantisation`: not stated (for_model)."""

    groups: tuple[GroupSpec, ...]
    revision: str = ""
    dtype: str = ""
    quantisation: str = ""

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("a cache schema has no groups; a model declares at least one.")
        group_names = [group.name for group in self.groups]
        part_names = [part.name for group in self.groups for part in group.parts]
        for kind, names in (("group", group_names), ("part", part_names)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"cache {kind} names must differ; given twice: {twice}.")

    def group(self, name: str) -> GroupSpec:
        """The group of that name."""
        for group in self.groups:
            if group.name == name:
                return group
        known = ", ".join(group.name for group in self.groups)
        raise ConfigError(f"no cache group {name!r}; this model has {known}.")

    def bytes_per_page(self, group: str) -> int:
        """Bytes of one page of that group, over all its parts and banks."""
        return self.group(group).bytes_per_page

    def for_model(self, *, revision: str, dtype: str, quantisation: str) -> CacheSchema:
        """The same schema, naming what else the cached content depends on."""
        return replace(self, revision=revision, dtype=dtype, quantisation=quantisation)

    def namespace_id(self) -> str:
        """Hash of everything that the bytes of a page depend on, but for its tokens.

        A schema without a revision names only its layouts: good for an index that dies with its
        process, not for a host or disk tier (those ask for `for_model` first).
        """
        content = {
            "model": [self.revision, self.dtype, self.quantisation],
            "groups": [
                {
                    "name": group.name,
                    "page": [group.page_size, group.tokens_per_entry],
                    "rules": [repr(group.sharing), repr(group.rollback)],
                    "parts": [[p.name, p.layer, p.layout.versioned_id] for p in group.parts],
                }
                for group in self.groups
            ],
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def prefix_step_tokens(self) -> int | None:
        """Smallest step, in tokens, at which prefixes can be shared; None: never. Told at start."""
        steps = []
        for group in self.groups:
            if isinstance(group.sharing, Private):
                if group.sharing.empty_every == 0:
                    return None
                steps.append(group.sharing.empty_every)
            else:
                steps.append(group.tokens_per_page)
        return math.lcm(*steps)

    def reusable_tokens(self, num_matching: int) -> int:
        """How many of `num_matching` equal leading tokens can be taken from the cache."""
        step = self.prefix_step_tokens
        if step is None:
            return 0
        lookahead = max(
            (g.sharing.lookahead for g in self.groups if isinstance(g.sharing, Paged)), default=0
        )
        return max(num_matching - lookahead, 0) // step * step
