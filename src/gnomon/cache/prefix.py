"""Spans of pages, and the index that finds those whose content a new request starts with.

A span is the unit of sharing: `span_tokens` consecutive tokens of one sequence and the pages that
hold them in every cache group together. A full span is named by a digest that covers all that its
content depends on: the cache's name space, the salt, and every token from the sequence's start:
    root     = H(namespace, salt)
    digest_i = H(digest_{i-1}, tokens of span i)          H = BLAKE2b, 256 bits
so that equal digests mean equal content, and a span can be used only behind its own past.

In:  token ids, or digests made of them.
Out: digests; the longest run of known spans.
Not here: reference counts, eviction and page ids (cache/pages.py), which spans are full (engine).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class Span:
    """The pages of one span of tokens, per group. Made and counted by PagePool alone.

    refs    how many requests hold it; `digest` its name in the index, None while it is private;
    parent  the digest before it, None for the first span of a sequence (or a private one)
    """

    __slots__ = ("digest", "pages", "parent", "refs")

    def __init__(self, pages: tuple[tuple[int, ...], ...]) -> None:
        self.pages = pages
        self.refs = 1
        self.digest: bytes | None = None
        self.parent: bytes | None = None

    def __repr__(self) -> str:
        name = "private" if self.digest is None else self.digest.hex()[:8]
        return f"Span({name}, pages={self.pages}, refs={self.refs})"


def root_digest(namespace: str, salt: str) -> bytes:
    """What the chain of a sequence starts from. Different salts share nothing."""
    head = namespace.encode()
    body = len(head).to_bytes(8, "little") + head + salt.encode("utf-8", "surrogatepass")
    return blake2b(body, digest_size=DIGEST_BYTES, person=b"gnomon root").digest()


def next_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of the span that holds `tokens` (all of its span_tokens ids) behind `parent`."""
    body = parent + array("q", tokens).tobytes()
    return blake2b(body, digest_size=DIGEST_BYTES, person=b"gnomon span").digest()


class PrefixIndex:
    """digest -> span, for every span that may be shared."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: dict[bytes, Span] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans.values())

    def get(self, digest: bytes) -> Span | None:
        """The span of this digest, if it is known."""
        return self._spans.get(digest)

    def add(self, span: Span, digest: bytes, parent: bytes | None) -> None:
        """Make a private span findable. The digest must be unknown so far."""
        assert span.digest is None
        assert digest not in self._spans
        span.digest, span.parent = digest, parent
        self._spans[digest] = span

    def remove(self, span: Span) -> None:
        """Forget a span: it is private again."""
        assert span.digest is not None
        del self._spans[span.digest]
        span.digest = span.parent = None

    def longest_prefix(self, digests: Iterable[bytes]) -> list[Span]:
        """The spans of the leading digests that are known; stops at the first unknown one.

        `digests` may be lazy: none is asked for behind the first miss.
        """
        found: list[Span] = []
        for digest in digests:
            span = self._spans.get(digest)
            if span is None:
                break
            found.append(span)
        return found
