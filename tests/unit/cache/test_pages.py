"""PagePool: every page is free or held, steps keep theirs, the oldest unused content goes first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gnomon.cache.pages import PagePool
from gnomon.cache.prefix import Span, next_digest, root_digest
from gnomon.errors import ConfigError, GnomonError

ROOT = root_digest("", "")
Pages = tuple[tuple[int, ...], ...]


def take(pool: PagePool, num_spans: int) -> list[Span]:
    spans = pool.allocate(num_spans)
    assert spans is not None
    return spans


def register_chain(pool: PagePool, spans: list[Span], name: int) -> list[bytes]:
    """Register these as the content `name`, 0, 1, ..."""
    digests = [next_digest(ROOT, [name])]
    for place in range(1, len(spans)):
        digests.append(next_digest(digests[-1], [place]))
    for place, span in enumerate(spans):
        parent = digests[place - 1] if place else None
        assert pool.register(span, digests[place], parent) is span
    return digests


def test_pages_are_given_whole_spans_at_a_time_in_every_group() -> None:
    pool = PagePool({"latent": (14, 4), "compressed": (30, 2), "state": (5, 8)})
    assert (pool.span_tokens, pool.pages_per_span) == (8, (2, 4, 1))
    assert pool.num_spans == 4  # what the smallest group holds: (5 - 1) / 1
    assert pool.num_spans_for(0) == 0
    assert [pool.num_spans_for(n) for n in (1, 8, 9)] == [1, 1, 2]
    spans = take(pool, 4)
    for group, num_pages in enumerate((8, 16, 4)):
        pages = [page for span in spans for page in span.pages[group]]
        assert len(set(pages)) == num_pages
        assert 0 not in pages
    assert pool.allocate(1) is None
    assert pool.usage == 1.0
    pool.release(spans)
    assert (pool.usage, pool.num_available) == (0.0, 4)
    pool.check_integrity(Counter())


@pytest.mark.parametrize(
    "groups", [{}, {"a": (1, 4)}, {"a": (9, 0)}, {"a": (9, 4), "b": (3, 1)}], ids=str
)
def test_a_cache_that_holds_nothing_is_refused(groups: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match=r"pages|groups"):
        PagePool(groups)


def test_released_content_stays_and_can_be_taken_up_again() -> None:
    pool = PagePool({"tokens": (5, 4)})
    spans = take(pool, 3)
    digests = register_chain(pool, spans[:2], 1)
    pool.release(spans)
    assert pool.num_available == 4
    assert pool.index.longest_prefix(digests) == spans[:2]
    pool.acquire(spans[:2])
    assert pool.num_available == 2
    assert pool.allocate(3) is None  # held content is not taken away
    pool.check_integrity(Counter(spans[:2]))


def test_the_oldest_is_evicted_first_and_tails_before_their_past() -> None:
    pool = PagePool({"tokens": (7, 4)})
    old, young = take(pool, 3), take(pool, 3)
    old_digests, young_digests = register_chain(pool, old, 1), register_chain(pool, young, 2)
    pool.release(old)
    pool.release(young)
    pool.acquire(old[:1])  # somebody shares the first span of the older chain,
    pool.release(old[:1])  # which makes it the youngest of all
    order = []
    for _ in range(6):
        before = {span.digest for span in pool.index}
        take(pool, 1)
        order += before - {span.digest for span in pool.index}
    assert order == [*old_digests[:0:-1], *young_digests[::-1], old_digests[0]]
    assert pool.num_evictions == 6
    assert pool.allocate(1) is None


def test_the_first_to_compute_a_content_owns_its_name() -> None:
    pool = PagePool({"tokens": (5, 4)})
    first, second = take(pool, 1)[0], take(pool, 1)[0]
    digest = next_digest(ROOT, [1])
    assert pool.register(first, digest, None) is first
    assert pool.register(second, digest, None) is first
    pool.acquire([first])
    pool.release([second])
    assert pool.num_available == 3
    pool.check_integrity(Counter({first: 2}))


def test_pages_of_a_running_step_are_not_given_away() -> None:
    pool = PagePool({"tokens": (3, 4)})
    spans = take(pool, 2)
    pool.begin_step(1)
    pool.begin_step(2)
    pool.release(spans[:1])  # named by steps 1 and 2, for all that the pool knows
    pool.retire_step(1)
    pool.begin_step(3)
    pool.release(spans[1:])
    assert (pool.num_available, pool.num_postponed) == (0, 2)
    pool.retire_step(2)
    assert (pool.num_available, pool.num_postponed) == (1, 1)
    pool.retire_step(3)
    assert (pool.num_available, pool.num_postponed) == (2, 0)
    pool.check_integrity(Counter())


def test_steps_retire_once_and_in_order() -> None:
    pool = PagePool({"tokens": (3, 4)})
    pool.begin_step(1)
    pool.begin_step(2)
    with pytest.raises(GnomonError, match="step 2 retires"):
        pool.retire_step(2)
    with pytest.raises(GnomonError, match="step 2 begins"):
        pool.begin_step(2)
    pool.retire_step(1)
    with pytest.raises(GnomonError, match="step 1 retires"):
        pool.retire_step(1)


def test_the_check_sees_what_is_wrong() -> None:
    pool = PagePool({"tokens": (6, 4)})
    spans = take(pool, 2)
    register_chain(pool, spans, 1)
    with pytest.raises(GnomonError, match="0 holders"):
        pool.check_integrity(Counter(spans[:1]))
    spans[0].refs += 1
    with pytest.raises(GnomonError, match="1 holders"):
        pool.check_integrity(Counter(spans))
    spans[0].refs -= 1
    pool.index.remove(spans[0])
    with pytest.raises(GnomonError, match="lacks its past"):
        pool.check_integrity()
    other = PagePool({"tokens": (6, 4)})
    span = take(other, 1)[0]
    span.pages = ((3,),)
    with pytest.raises(GnomonError, match="not each page"):
        other.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Holders that take, share, register and release chains, against a plain list of counts."""

    # A span's pages stay together, whoever holds them, so that pages can be compared by the span.
    @initialize(groups=st.sampled_from([{"a": (7, 4)}, {"b": (6, 4), "c": (6, 4)}]))
    def start(self, groups: dict[str, tuple[int, int]]) -> None:
        self.pool = PagePool(groups)
        self.holders: list[list[Span]] = []  # each holds a chain, registered from its start
        self.pinned: list[tuple[int, set[Pages]]] = []  # steps and the pages that they name
        self.num_steps = 0

    def check(self) -> None:
        self.pool.check_integrity(Counter(span for chain in self.holders for span in chain))

    @rule(num=st.integers(1, 4))
    def take(self, num: int) -> None:
        available = self.pool.num_available
        spans = self.pool.allocate(num)
        assert (spans is None) == (num > available)
        if spans is not None:
            taken = {span.pages for span in spans}
            assert not any(taken & named for _, named in self.pinned)
            self.holders.append(spans)
        self.check()

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.integers(0, 2))
    def register_or_join(self, data: st.DataObject, name: int) -> None:
        chain = data.draw(st.sampled_from(self.holders))
        if chain[0].digest is not None:
            return
        digest, parent = next_digest(ROOT, [name]), None
        for place, own in enumerate(chain):
            span = self.pool.register(own, digest, parent)
            if span is not own:
                self.pool.acquire([span])
                self.pool.release([own])
                chain[place] = span
            digest, parent = next_digest(digest, [place]), digest
        self.check()

    @rule(name=st.integers(0, 2), num=st.integers(1, 4))
    def share(self, name: int, num: int) -> None:
        digests = [next_digest(ROOT, [name])]
        for place in range(num - 1):
            digests.append(next_digest(digests[-1], [place]))
        found = self.pool.index.longest_prefix(digests)
        if found:
            self.pool.acquire(found)
            self.holders.append(found)
        self.check()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(place))
        self.check()

    @rule()
    def begin_step(self) -> None:
        self.num_steps += 1
        self.pool.begin_step(self.num_steps)
        named = {span.pages for chain in self.holders for span in chain}
        self.pinned.append((self.num_steps, named))

    @precondition(lambda self: self.pinned)
    @rule()
    def retire_step(self) -> None:
        self.pool.retire_step(self.pinned.pop(0)[0])
        self.check()


PoolMachine.TestCase.settings = settings(stateful_step_count=30)
TestPool = PoolMachine.TestCase
