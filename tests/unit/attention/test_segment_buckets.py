"""Buckets of captured prefill steps: none pads to more than twice its rows, few in all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.segment_plan import segment_bucket, segment_buckets


@given(st.integers(0, 5000), st.sampled_from([1, 16, 48]), st.integers(1, 6000))
def test_buckets(most, multiple, num_rows):
    buckets = segment_buckets(most, multiple)
    assert list(buckets) == sorted(set(buckets))
    assert all(rows % multiple == 0 and 0 < rows <= most for rows in buckets)
    bucket = segment_bucket(num_rows, buckets)
    if bucket is None:
        assert all(rows < num_rows or rows > 2 * num_rows for rows in buckets)
    else:
        assert num_rows <= bucket <= 2 * num_rows


def test_buckets_are_few_and_none_leaves_a_gap():
    buckets = segment_buckets(1024)
    assert len(buckets) < 12
    assert all(segment_bucket(rows, buckets) for rows in range(4, 1025))
    assert segment_buckets(0) == segment_buckets(7, 16) == ()
