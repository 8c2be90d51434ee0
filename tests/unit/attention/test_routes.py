"""Routes are pure functions of a request's own exact lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.geometry import HostLengths
from gnomon.attention.routes import (
    AttentionDims,
    DensePolicy,
    Route,
    RoutePolicy,
    choose_routes,
)
from gnomon.errors import ConfigError, GeometryError

TINY = AttentionDims(4, 64, 32, 16, 32, index_topk=16, index_num_heads=16, index_head_dim=32)
V32 = AttentionDims(128, 512, 128, 64, 128, index_topk=2048, index_num_heads=64, index_head_dim=128)

LENGTHS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda x: (x[0], x[0] + x[1])),
    max_size=8,
)


def _routes(
    lengths: list[tuple[int, int]], policy: RoutePolicy | None = None, dims: AttentionDims = TINY
) -> list[Route]:
    host = HostLengths(tuple(q for q, _ in lengths), tuple(kv for _, kv in lengths))
    return list(choose_routes(host, dims, policy))


@given(LENGTHS, st.sampled_from(list(DensePolicy)), st.integers(1, 4))
def test_a_request_goes_dense_only_where_all_keys_are_selected(
    lengths: list[tuple[int, int]], dense: DensePolicy, most: int
) -> None:
    policy = RoutePolicy(dense, most)
    for (q, kv), route in zip(lengths, _routes(lengths, policy), strict=True):
        if route is Route.DENSE:
            assert q > most
            assert kv <= 16
            assert dense is not DensePolicy.NEVER
        elif dense is DensePolicy.ALWAYS:
            assert q <= most or kv > 16
        assert route == _routes([(q, kv)], policy)[0]  # whatever else is in the batch


def test_auto_takes_fresh_prompts_and_leaves_short_tails_of_long_contexts() -> None:
    for dims, longest in ((TINY, 16), (V32, 2048)):
        fresh = [(n, n) for n in range(2, longest + 1)]
        assert set(_routes(fresh, dims=dims)) == {Route.DENSE}
        assert _routes([(1, 1), (longest + 1, longest + 1)], dims=dims) == [Route.SPARSE] * 2
    assert _routes([(2, 2000), (1500, 2000)], dims=V32) == [Route.SPARSE, Route.DENSE]


def test_auto_is_the_count_of_multiply_adds() -> None:
    """Counted operation by operation for one head of V3.2, queries and keys one by one."""
    query_len, kv_len = 40, 170
    for query_len in (20, 60, 120, 140, 165):
        dense = sparse = 0
        for _ in range(kv_len):
            dense += 512 * 128 + 512 * 128  # latent -> key, value
        for row in range(query_len):
            seen = kv_len - query_len + row + 1
            sparse += 128 * 512 + 512 * 128  # query -> latent space, output -> head
            dense += seen * (128 + 64) + seen * 128
            sparse += seen * (512 + 64) + seen * 512
        expected = Route.DENSE if dense <= sparse else Route.SPARSE
        assert _routes([(query_len, kv_len)], dims=V32) == [expected]


def test_few_rows_of_a_request_do_not_repay_launches_of_their_own() -> None:
    few = RoutePolicy(min_dense_rows=256)
    lengths = [(255, 255), (256, 256), (100, 1900), (1900, 1900)]
    sparse, dense = Route.SPARSE, Route.DENSE
    assert _routes(lengths, few, V32) == [sparse, dense, sparse, dense]
    always = RoutePolicy(DensePolicy.ALWAYS, min_dense_rows=256)
    assert _routes(lengths, always, V32) == [dense] * 4


def test_an_upper_bound_never_decides_a_route() -> None:
    bound = HostLengths((1, 3), (9, 12), is_exact=False)
    with pytest.raises(GeometryError, match="request 1: the route of 3 rows hangs on kv_len 12"):
        choose_routes(bound, TINY)
    both = (Route.SPARSE, Route.SPARSE)
    assert choose_routes(bound, TINY, RoutePolicy(DensePolicy.NEVER)) == both
    assert choose_routes(bound, TINY, RoutePolicy(max_decode_rows=3)) == both


def test_without_an_indexer_every_length_may_go_dense() -> None:
    dims = AttentionDims(4, 64, 32, 16, 32)
    assert _routes([(600, 600), (1, 600)], dims=dims) == [Route.DENSE, Route.SPARSE]


def test_bad_values_name_the_field() -> None:
    with pytest.raises(ConfigError, match="allowed are auto, never, always_when_allowed"):
        RoutePolicy("sometimes")
    assert RoutePolicy("never").dense is DensePolicy.NEVER
    with pytest.raises(ConfigError, match="max_decode_rows is 0"):
        RoutePolicy(max_decode_rows=0)
    with pytest.raises(ConfigError, match=r"num_heads is 0; at least 1"):
        AttentionDims(0, 64, 32, 16, 32)
    with pytest.raises(ConfigError, match="all three are positive, or all are 0"):
        AttentionDims(4, 64, 32, 16, 32, index_topk=16)
    assert AttentionDims(4, 64, 32, 0, 32).qk_rope_head_dim == 0  # NoPE
