"""Which route AUTO takes, against the multiply-adds counted row by row and key by key."""

from __future__ import annotations

from gnomon.attention.axes import HostLengths
from gnomon.attention.routes import (
    AttentionDims,
    DensePolicy,
    Route,
    RoutePolicy,
    choose_routes,
    may_go_dense,
)

V32 = AttentionDims(1, 512, 128, 64, 128, index_topk=2048, index_num_heads=64, index_head_dim=128)
UNEVEN = AttentionDims(1, 7, 5, 3, 2, index_topk=64, index_num_heads=1, index_head_dim=4)


def counted(query_len: int, kv_len: int, dims: AttentionDims) -> tuple[int, int]:
    """(dense, sparse) multiply-adds of one head."""
    latent, nope = dims.kv_lora_rank, dims.qk_nope_head_dim
    rope, value = dims.qk_rope_head_dim, dims.v_head_dim
    dense = sparse = 0
    for _ in range(kv_len):
        dense += latent * nope + latent * value
    for row in range(query_len):
        sparse += nope * latent + latent * value
        for _ in range(kv_len - query_len + row + 1):
            dense += nope + rope + value
            sparse += latent + rope + latent
    return dense, sparse


def is_dense(query_len: int, kv_len: int, dims: AttentionDims) -> bool:
    return choose_routes(HostLengths((query_len,), (kv_len,)), dims) == (Route.DENSE,)


def test_auto_takes_the_cheaper_route_at_every_small_length() -> None:
    found = set()
    for kv_len in range(2, 25):
        for query_len in range(2, kv_len + 1):
            dense, sparse = counted(query_len, kv_len, UNEVEN)
            assert is_dense(query_len, kv_len, UNEVEN) == (dense <= sparse), (query_len, kv_len)
            found.add(dense <= sparse)
    assert found == {True, False}


def test_auto_turns_at_the_counted_length_with_the_sizes_of_v32() -> None:
    """Between 90 and 100 rows of 170 keys the expansion of the other keys begins to pay."""
    routes = []
    for query_len in range(2, 171):
        dense, sparse = counted(query_len, 170, V32)
        assert is_dense(query_len, 170, V32) == (dense <= sparse), query_len
        routes.append(dense <= sparse)
    assert routes == sorted(routes)
    assert 0 < sum(routes) < len(routes)


def test_one_request_is_asked_alone_too() -> None:
    """may_go_dense by itself: each reason against it is enough."""
    always, never = RoutePolicy(DensePolicy.ALWAYS, 2), RoutePolicy(DensePolicy.NEVER, 2)
    assert may_go_dense(3, 64, UNEVEN, always)
    assert not may_go_dense(2, 64, UNEVEN, always)  # as few rows as a decode has
    assert not may_go_dense(3, 65, UNEVEN, always)  # not every key would be selected
    assert not may_go_dense(64, 64, UNEVEN, never)
