"""Prefix digests: equal exactly when name space, salt and the whole past are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.cache.prefix import PrefixIndex, Span, next_digest, root_digest

spans_of_tokens = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=2), min_size=1, max_size=4
)
pasts = st.tuples(st.sampled_from(["", "a", "ab"]), st.sampled_from(["", "b"]), spans_of_tokens)


def chain(namespace: str, salt: str, spans: list[list[int]]) -> bytes:
    digest = root_digest(namespace, salt)
    for tokens in spans:
        digest = next_digest(digest, tokens)
    return digest


@given(one=pasts, other=pasts)
def test_digests_are_equal_exactly_when_the_pasts_are(one, other) -> None:
    assert (chain(*one) == chain(*other)) == (one == other)


def test_the_border_between_name_space_and_salt_counts() -> None:
    assert root_digest("ab", "") != root_digest("a", "b")


def test_large_ids_and_odd_salts() -> None:
    root = root_digest("é", "\ud800\0")  # a lone surrogate can come out of JSON
    assert next_digest(root, [2**40]) != next_digest(root, [2**40 + 1])


def make_index(num: int) -> tuple[PrefixIndex, list[bytes], list[Span]]:
    index, digests, spans = PrefixIndex(), [root_digest("", "")], []
    for place in range(num):
        digests.append(next_digest(digests[-1], [place]))
        spans.append(Span(((place + 1,),)))
        index.add(spans[-1], digests[-1], digests[-2] if place else None)
    return index, digests[1:], spans


def test_the_longest_prefix_stops_at_the_first_gap_and_asks_no_further() -> None:
    index, digests, spans = make_index(5)
    assert index.longest_prefix(digests) == spans
    assert index.longest_prefix(digests[:2]) == spans[:2]
    index.remove(spans[2])
    asked = []
    assert index.longest_prefix(asked.append(d) or d for d in digests) == spans[:2]
    assert asked == digests[:3]
    assert spans[2].digest is None
    assert len(index) == 4
    assert index.get(digests[2]) is None


def test_a_digest_names_one_span() -> None:
    index, digests, _ = make_index(1)
    with pytest.raises(AssertionError):
        index.add(Span(((9,),)), digests[0], None)
