"""PagePool: who holds which pages of the cache, of all groups together; no tensors.

In:  the number and the size of the pages of each cache group.
Out: spans (cache/prefix.py): `span_tokens` tokens' worth of pages in every group, taken and given
     back as one. Page 0 of each group is the null page and is never given out.

Life of a span: allocate (private, one holder) -> register (findable; content never changes again)
-> held by any number of requests -> released by the last: kept, evictable, in order of release
-> found again, or evicted (forgotten and its pages free). A private span is free at once.
Requests release their spans tail first, and who holds a registered span holds its registered past;
therefore the oldest evictable span never has a registered child, and chains shrink from their ends.

Steps: pages named by a step that is still running must not be given away. Between
`begin_step(id)` and `retire_step(id)` every release is postponed until all steps begun before it
have retired; steps retire in the order of their ids.

Group sizes: span_tokens is the least common multiple of the groups' page sizes in tokens (a page
of 64 entries, each for 4 tokens, is 256). Choose page sizes so that they agree: a request holds
whole spans, and the prefix cache works in steps of one span.
Not here: tokens, digests and policy (engine), bytes (cache/tensors.py).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from gnomon.cache.prefix import PrefixIndex, Span
from gnomon.errors import ConfigError, GnomonError


class PagePool:
    """Spans, their reference counts and the prefix index. Single-threaded.

    groups     name -> (number of pages with the null page, tokens per page)
    namespace  what else the cached content depends on (CacheSchema.namespace_id, model revision);
               part of every digest
    """

    def __init__(self, groups: Mapping[str, tuple[int, int]], namespace: str = "") -> None:
        for name, (num_pages, page_size) in groups.items():
            if num_pages < 2 or page_size < 1:
                raise ConfigError(
                    f"cache group {name!r} has {num_pages} pages of {page_size} tokens; it needs "
                    "at least 2 pages (page 0 is the null page) of at least 1 token"
                )
        if not groups:
            raise ConfigError("the cache has no groups; a model declares at least one")
        self.groups = tuple(groups)
        self.namespace = namespace
        self.span_tokens = math.lcm(*(size for _, size in groups.values()))
        self.pages_per_span = tuple(self.span_tokens // size for _, size in groups.values())
        self._num_pages = tuple(num for num, _ in groups.values())
        self.num_spans = min(
            (num - 1) // k for num, k in zip(self._num_pages, self.pages_per_span, strict=True)
        )
        if self.num_spans < 1:
            raise ConfigError(
                f"the cache groups {dict(groups)} do not hold one span of {self.span_tokens} "
                "tokens in every group; give them more pages or page sizes that agree"
            )
        self.index = PrefixIndex()
        self.num_evictions = 0
        self._free = tuple(list(range(num - 1, 0, -1)) for num in self._num_pages)
        self._spans: set[Span] = set()  # all that have pages: held, or evictable
        self._evictable: OrderedDict[Span, None] = OrderedDict()  # the oldest first
        self._in_flight: deque[int] = deque()
        self._postponed: deque[tuple[int, list[Span]]] = deque()
        self.num_postponed = 0
        # (group, pages): told of pages that become free, and of pages that are taken
        self.on_change_of_hands: Callable[[str, Sequence[int]], None] | None = None

    @property
    def num_available(self) -> int:
        """Spans that `allocate` can give now, by eviction if need be."""
        return self.num_spans - len(self._spans) + len(self._evictable)

    @property
    def usage(self) -> float:
        """The share of the spans that requests hold, 0 to 1. Evictable ones do not count."""
        return 1.0 - self.num_available / self.num_spans

    def num_spans_for(self, num_tokens: int) -> int:
        """Spans that hold so many tokens."""
        return -(-num_tokens // self.span_tokens)

    # ------------------------------------------------------------ spans

    def allocate(self, num_spans: int) -> list[Span] | None:
        """So many private spans with one holder each; None, and nothing done, if there are less."""
        if num_spans > self.num_available:
            return None
        taken: list[Span] = []
        for _ in range(num_spans):
            if len(self._spans) == self.num_spans:
                self._evict_oldest()
            pages = tuple(
                tuple(free.pop() for _ in range(k))
                for free, k in zip(self._free, self.pages_per_span, strict=True)
            )
            span = Span(pages)
            self._spans.add(span)
            self._tell(span)
            taken.append(span)
        return taken

    def acquire(self, spans: Sequence[Span]) -> None:
        """One holder more for each of these: found in the index, or held by another request."""
        for span in spans:
            if span.refs == 0:
                del self._evictable[span]
            span.refs += 1

    def release(self, spans: Sequence[Span]) -> None:
        """One holder less for each of these, given in the order of their tokens.

        Takes effect when all steps begun so far have retired; at once if none is running.
        """
        if not spans:
            return
        if self._in_flight:
            self._postponed.append((self._in_flight[-1], list(spans)))
            self.num_postponed += len(spans)
        else:
            self._drop(spans)

    def register(self, span: Span, digest: bytes, parent: bytes | None) -> Span:
        """Make a full span findable, once its content is in the cache; returns the one that is.

        Another request may have computed the same content meanwhile: then its span is returned,
        and the caller goes over to it (acquire it, release its own).
        """
        known = self.index.get(digest)
        if known is not None:
            return known
        self.index.add(span, digest, parent)
        return span

    def evict_all(self) -> int:
        """Forget every span that nobody holds; returns their number."""
        count = len(self._evictable)
        for _ in range(count):
            self._evict_oldest()
        return count

    # ------------------------------------------------------------ steps

    def begin_step(self, step_id: int) -> None:
        """A step that names pages starts. Ids grow."""
        if self._in_flight and step_id <= self._in_flight[-1]:
            raise GnomonError(f"step {step_id} begins after step {self._in_flight[-1]}")
        self._in_flight.append(step_id)

    def retire_step(self, step_id: int) -> None:
        """That step has run, or never will; it must be the oldest one that has begun."""
        if not self._in_flight or self._in_flight[0] != step_id:
            raise GnomonError(
                f"step {step_id} retires, but the steps in flight are {list(self._in_flight)}; "
                "each step retires once, in the order of the ids"
            )
        self._in_flight.popleft()
        while self._postponed and self._postponed[0][0] <= step_id:
            spans = self._postponed.popleft()[1]
            self.num_postponed -= len(spans)
            self._drop(spans)

    def _drop(self, spans: Sequence[Span]) -> None:
        for span in reversed(spans):
            span.refs -= 1
            if span.refs == 0:
                if span.digest is None:
                    self._free_pages(span)
                else:
                    self._evictable[span] = None

    def _evict_oldest(self) -> None:
        span, _ = self._evictable.popitem(last=False)
        self.index.remove(span)
        self._free_pages(span)
        self.num_evictions += 1

    def _free_pages(self, span: Span) -> None:
        self._spans.remove(span)
        for free, pages in zip(self._free, span.pages, strict=True):
            free.extend(reversed(pages))
        self._tell(span)

    def _tell(self, span: Span) -> None:
        if self.on_change_of_hands is not None:
            for name, pages in zip(self.groups, span.pages, strict=True):
                self.on_change_of_hands(name, pages)

    # ------------------------------------------------------------ checks

    def check_integrity(self, holders: Counter[Span] | None = None) -> None:
        """Raise GnomonError if a page is lost or given twice, or a count or chain is wrong.

        holders: how often each span is held by requests, if the caller knows; then every
        reference must be one of these or one whose release is postponed. Time O(pages).
        """
        self._check_pages()
        self._check_index()
        postponed = Counter(span for _, spans in self._postponed for span in spans)
        _require(postponed.total() == self.num_postponed, "the number of postponed spans is wrong")
        for span in self._spans:
            _require(span.refs >= postponed[span], "%s is released more often than held", span)
            if holders is not None:
                held = holders[span] + postponed[span]
                _require(span.refs == held, "%s has %d holders", span, held)
        if holders is not None:
            lost = holders.keys() - self._spans
            _require(not lost, "requests hold spans that were given back: %s", lost)

    def _check_pages(self) -> None:
        for g, (name, num_pages) in enumerate(zip(self.groups, self._num_pages, strict=True)):
            pages = list(self._free[g])
            for span in self._spans:
                num = len(span.pages[g])
                _require(num == self.pages_per_span[g], "%s lacks pages of %s", span, name)
                pages.extend(span.pages[g])
            pages.sort()
            _require(
                pages == list(range(1, num_pages)), "not each page of %s is free or in use", name
            )

    def _check_index(self) -> None:
        for span in self._spans:
            is_evictable = span in self._evictable
            _require((span.refs == 0) == is_evictable, "%s: evictable %s", span, is_evictable)
            _require(span.refs > 0 or span.digest is not None, "%s is lost", span)
        place = {span: number for number, span in enumerate(self._evictable)}
        for span in self.index:
            digest, last = span.digest, len(place)
            _require(span in self._spans, "%s is indexed without pages", span)
            _require(
                digest is not None and self.index.get(digest) is span, "%s has another name", span
            )
            if span.parent is not None:
                parent = self.index.get(span.parent)
                if parent is None:
                    raise GnomonError(f"the page pool is inconsistent: {span} lacks its past")
                is_first = place.get(span, last) <= place.get(parent, last)
                _require(is_first, "%s would be evicted after its past", span)


def _require(claim: bool, message: str, *about: object) -> None:
    if not claim:
        raise GnomonError("the page pool is inconsistent: " + message % about)
