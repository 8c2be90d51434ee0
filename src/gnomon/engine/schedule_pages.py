"""How a request takes and gives back pages: found, shared with its parent, grown, registered.

In:  the PagePool and a RequestState. Out: changes in both, always together.
Not here: who gives way to whom when pages run out (engine/scheduler.py).
"""

from __future__ import annotations

from gnomon.cache.pages import PagePool
from gnomon.cache.prefix import Span
from gnomon.engine.request import RequestState, SpanTable, Status


def find_prefix(pool: PagePool, state: RequestState, is_cache_enabled: bool) -> list[Span]:
    """The spans that a request may start with; at least one of its tokens is left to compute.

    With the cache enabled the index knows whatever the parent of a fork has computed; without it
    the parent's own spans are taken, if it runs.
    """
    if not state.may_share:
        return []
    most = (len(state.tokens) - 1) // pool.span_tokens
    if is_cache_enabled:
        digests = state.digests(most, pool.namespace, pool.span_tokens)
        return pool.index.longest_prefix(digests)
    parent = state.parent
    if parent is None or parent.status is not Status.RUNNING:
        return []
    computed = min(parent.num_computed, state.num_prompt)
    return parent.table.spans[: min(most, computed // pool.span_tokens)]


def num_missing(pool: PagePool, state: RequestState, prefix: list[Span]) -> int:
    """How many more spans than can be had now a start with this prefix would take; <= 0: it fits.

    All tokens known so far are counted, so that a prompt that starts is also finished.
    """
    num_new = pool.num_spans_for(len(state.tokens)) - len(prefix)
    num_revived = sum(span.refs == 0 for span in prefix)
    return num_new + num_revived - pool.num_available


def start(pool: PagePool, state: RequestState, prefix: list[Span]) -> None:
    """Take the prefix and pages for all tokens known so far; they must fit."""
    pool.acquire(prefix)
    fresh = pool.allocate(pool.num_spans_for(len(state.tokens)) - len(prefix))
    assert fresh is not None
    table = SpanTable(pool.pages_per_span)
    table.extend(prefix + fresh)
    state.open(table, len(prefix) * pool.span_tokens)
    state.num_registered = len(prefix)


def grow(pool: PagePool, state: RequestState, kv_len: int) -> bool:
    """Take pages until kv_len tokens fit; False, and nothing done, if there are none."""
    num_new = pool.num_spans_for(kv_len) - len(state.table)
    if num_new <= 0:
        return True
    spans = pool.allocate(num_new)
    if spans is None:
        return False
    state.table.extend(spans)
    return True


def register_full_spans(pool: PagePool, state: RequestState) -> None:
    """Make its computed full spans findable; call once the step that filled them is committed.

    Where another request was first with the same content, this one goes over to that span: so it
    holds the registered past of whatever it registers next, on which the eviction order rests.
    """
    num_full = state.num_computed // pool.span_tokens
    for place in range(state.num_registered, num_full):
        own = state.table.spans[place]
        digest = state.digest(place, pool.namespace, pool.span_tokens)
        parent = state.digest(place - 1, pool.namespace, pool.span_tokens) if place else None
        span = pool.register(own, digest, parent)
        if span is not own:
            pool.acquire([span])
            state.table.replace(place, span)
            pool.release([own])
    state.num_registered = max(state.num_registered, num_full)
