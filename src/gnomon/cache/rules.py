"""How a cache group's pages are shared between requests, and how rejected drafts are undone.

In:  numbers of tokens, entries or banks, from the model and the speculation settings.
Out: frozen values that a `GroupSpec` carries and that the memory plan counts.
Sharing says what a page belongs to; rollback says why tokens that verification rejects do no harm.
Not here: the work itself (the scheduler shares, the runner commits).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import ConfigError


def _at_least(least: int, **named: int) -> None:
    for name, value in named.items():
        if value < least:
            raise ConfigError(f"cache rule: {name} must be at least {least}; got {value}.")


@dataclass(frozen=True, slots=True)
class Paged:
    """Every token keeps its entry; whole pages are shared by prefix (latents, index keys).

    lookahead: an entry depends on this many tokens after its own (draft layers see the next
    token), so the last `lookahead` tokens of a matching prefix are computed anew.
    """

    lookahead: int = 0

    def __post_init__(self) -> None:
        _at_least(0, lookahead=self.lookahead)


@dataclass(frozen=True, slots=True)
class Window:
    """Only the last `num_tokens` tokens are read; pages that fell out of the window may go."""

    num_tokens: int

    def __post_init__(self) -> None:
        _at_least(1, window=self.num_tokens)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A running state, of which a copy is kept every `interval` tokens (recurrent layers)."""

    interval: int

    def __post_init__(self) -> None:
        _at_least(1, interval=self.interval)


@dataclass(frozen=True, slots=True)
class Private:
    """`num_entries` entries per request, never shared (pool tails, compressor state).

    empty_every: the content is empty at multiples of this many tokens, so a prefix may be reused
    there without it; 0 means never, and then no prefix of the model can be reused at all.
    """

    num_entries: int = 1
    empty_every: int = 0

    def __post_init__(self) -> None:
        _at_least(1, num_entries=self.num_entries)
        _at_least(0, empty_every=self.empty_every)


@dataclass(frozen=True, slots=True)
class Overwrite:
    """A rejected token's entry is written again by the token that takes its position."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Room for `num_tokens` more than are read, so that a rejected write hides nothing needed."""

    num_tokens: int

    def __post_init__(self) -> None:
        _at_least(1, ring=self.num_tokens)


@dataclass(frozen=True, slots=True)
class Banks:
    """`num_banks` = k + 1 copies of the state, one after each draft; the accepted one stays."""

    num_banks: int

    def __post_init__(self) -> None:
        _at_least(2, num_banks=self.num_banks)


Sharing = Paged | Window | Checkpoint | Private
Rollback = Overwrite | Ring | Banks


def check_pair(group: str, sharing: Sharing, rollback: Rollback) -> None:
    """Raise ConfigError unless `rollback` makes sense for what `sharing` keeps.

    Entries addressed by position are overwritten (or ringed where old ones leave); a state that
    each token changes in place needs banks, as no write of the next token restores it.
    """
    allowed: tuple[type[Rollback], ...]
    match sharing:
        case Paged():
            allowed = (Overwrite,)
        case Window():
            allowed = (Overwrite, Ring)
        case Checkpoint():
            allowed = (Overwrite, Banks)
        case Private():
            allowed = (Overwrite, Ring, Banks)
    if not isinstance(rollback, allowed):
        names = ", ".join(kind.__name__ for kind in allowed)
        raise ConfigError(
            f"cache group {group!r}: {type(sharing).__name__} sharing allows the rollback rules "
            f"{names}; got {rollback}."
        )
