"""Sizes of the steps that a warm-up runs: between them they meet every kernel of later steps.

In:  an engine's limits. Out: lists of steps, each the rows and the length of every request.
Kernels differ by how many rows of a kind a step has: rows of prompts that attend densely, rows that
choose their keys, rows that decode. Each kind climbs from few to many.
Not here: running them (warm_up.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MATES = 8  # requests of a step with several
FINE_ROWS = 2048  # from here on any number of rows fills a GPU
Work = list[tuple[int, int]]  # (rows, tokens in the cache once they have run) of each request


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What no step passes. ``topk``: 0, or the longest prompt that may be attended densely."""

    max_tokens: int
    max_seqs: int
    max_len: int
    num_pages: int
    page_size: int
    topk: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a request that is alone."""
        return min(self.max_len, self.num_pages * self.page_size)

    @property
    def fresh(self) -> int:
        """Rows of the largest prompt that one step computes."""
        return min(self.max_tokens, self.longest)

    def share(self, num_requests: int) -> int:
        """Tokens of each of several requests; there are pages for so many."""
        return min(self.max_len, self.num_pages // num_requests * self.page_size)


def shapes(room: Room) -> list[Work]:
    """Steps that between them take every way: a fresh prompt, a long one's end, each with decode.

    The largest of their kind.
    """
    num_mates = max(1, min(room.max_seqs, room.max_tokens, room.num_pages, MATES))
    share, topk, fresh = room.share(num_mates), room.topk, room.fresh
    rest = max(1, min(room.max_tokens - num_mates + 1, share))
    mates = [(1, share)] * (num_mates - 1)
    part = min(topk, rest)
    dense = [[(part, part), *mates]] if topk else []
    dense += [[(topk, topk)]] if 0 < topk < fresh else []
    return [
        *dense,
        [(fresh, fresh)],
        [(fresh, room.longest)],
        [(1, share)] * num_mates,
        [(rest, share), *mates],
    ]


def ladder(room: Room, most_captured: int, more: Iterable[int] = ()) -> list[Work]:
    """A request of ever more rows: fresh, of few rows behind all that fits, and behind ``topk``.

    For the last ones kernels differ by how well they fill the GPU, so that each number is at most
    an eighth above the one before; ``more`` are numbers that fill it in a way of their own.
    """
    most, longest = room.fresh, room.longest
    works = [[(rows, rows)] for rows in numbers(most, 4)]
    works += [[(rows, longest)] for rows in numbers(min(most, most_captured), 4)]
    fine = {*numbers(min(most, FINE_ROWS), 8), *(rows for rows in more if 2 <= rows <= most)}
    works += [[(rows, min(longest, rows + room.topk))] for rows in sorted(fine)]
    return works


def mixtures(room: Room, more: Iterable[int] = ()) -> list[Work]:
    """Ever more requests that decode, and ever more rows that choose keys beside a dense prompt.

    ``more``: numbers of the latter that are wanted too.
    """
    most = min(room.max_seqs, room.max_tokens, room.num_pages)
    works = [[(1, room.share(count))] * count for count in (1, *numbers(most, 4))]
    dense = min(room.topk, room.max_tokens // 2)
    pages_left = room.num_pages - -(-dense // room.page_size)
    longest = min(room.max_len, pages_left * room.page_size)
    if room.max_seqs > 1 and 0 < dense <= room.max_len and room.topk < longest:
        most = min(room.max_tokens - dense, longest - room.topk)
        beside = {*numbers(most, 1), *(rows for rows in more if 1 <= rows <= most)}
        works += [[(dense, dense), (rows, longest)] for rows in sorted(beside)]
    return works


def numbers(most: int, part: int) -> Iterator[int]:
    """2, ... up to ``most``, each larger by a ``part``-th of the one before, by one at least."""
    number = 2
    while number <= most:
        yield number
        number += max(1, number // part)
