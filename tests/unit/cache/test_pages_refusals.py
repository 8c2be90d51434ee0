"""What a PagePool says when it is given too little, and where exactly enough begins."""

from __future__ import annotations

import pytest

from gnomon.cache.pages import PagePool
from gnomon.errors import ConfigError


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a": (1, 4)}, r"'a' has 1 pages of 4 tokens; it needs at least 2 pages"),
        ({"a": (0, 4)}, r"'a' has 0 pages"),
        ({"a": (5, 0)}, r"'a' has 5 pages of 0 tokens"),
        ({"a": (9, 4), "b": (1, 4)}, r"'b' has 1 pages"),
        ({"a": (2, 4), "b": (9, 8)}, r"do not hold one span of 8 tokens in every group"),
        ({}, r"the cache has no groups"),
    ],
)
def test_a_pool_without_one_span_says_what_it_lacks(
    groups: dict[str, tuple[int, int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PagePool(groups)


def test_the_smallest_pools_hold_one_span() -> None:
    for groups in ({"a": (2, 1)}, {"a": (3, 4), "b": (2, 8)}):
        pool = PagePool(groups)
        assert (pool.num_spans, pool.num_available) == (1, 1)
        (span,) = pool.allocate(1) or []
        assert all(0 not in pages for pages in span.pages)
        assert pool.allocate(1) is None
