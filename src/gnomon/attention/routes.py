"""Which way each request's attention goes: DENSE (un-absorbed MHA) or SPARSE (absorbed MQA).

In:  exact host lengths of the requests, the model's attention dims, a policy.
Out: one Route a request. A request's route depends on its own lengths alone, so that it is the
     same whatever else is in the batch.
Not here: chunking and memory (plan.py), the two routes themselves (ops).

Both routes give one answer where a request has at most index_topk keys, because then every key
is selected. An upper bound never decides: inexact lengths raise where a route hangs on them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from gnomon.attention.axes import HostLengths
from gnomon.errors import ConfigError, GeometryError

__all__ = ["AttentionDims", "DensePolicy", "Route", "RoutePolicy", "choose_routes", "may_go_dense"]


@dataclass(frozen=True, slots=True)
class AttentionDims:
    """Sizes of one attention layer on this rank; index_* are 0 for a model without an indexer."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int = 0
    index_num_heads: int = 0
    index_head_dim: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name.startswith("index_") or "rope" in field.name else 1
            if value < least:
                raise ConfigError(f"attention dims: {field.name} is {value}; at least {least}")
        if (self.index_topk > 0) != (self.index_num_heads > 0 and self.index_head_dim > 0):
            raise ConfigError(
                f"attention dims: index_topk {self.index_topk}, index_num_heads "
                f"{self.index_num_heads}, index_head_dim {self.index_head_dim}; "
                "all three are positive, or all are 0"
            )


class Route(StrEnum):
    """DENSE: keys and values expanded from latents, one head each. SPARSE: over an index list."""

    DENSE = "dense"
    SPARSE = "sparse"


class DensePolicy(StrEnum):
    """AUTO: where it is allowed and takes fewer multiply-adds."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always_when_allowed"


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """``max_decode_rows``: requests with at most so many rows (1 + drafts) always stay SPARSE.

    ``min_dense_rows``: of a request, for AUTO. The dense route takes launches of its own for each
    request, which fewer rows do not repay.
    """

    dense: DensePolicy = DensePolicy.AUTO
    max_decode_rows: int = 1
    min_dense_rows: int = 0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "dense", DensePolicy(self.dense))
        except ValueError as error:
            allowed = ", ".join(policy.value for policy in DensePolicy)
            raise ConfigError(f"dense policy {self.dense!r}; allowed are {allowed}") from error
        if self.max_decode_rows < 1:
            raise ConfigError(f"max_decode_rows is {self.max_decode_rows}; at least 1 is needed")


def may_go_dense(query_len: int, kv_len: int, dims: AttentionDims, policy: RoutePolicy) -> bool:
    """Whether the dense route is exact and wished for one request with exact lengths."""
    if policy.dense is DensePolicy.NEVER or query_len <= policy.max_decode_rows:
        return False
    if dims.index_topk and kv_len > dims.index_topk:
        return False
    if policy.dense is DensePolicy.ALWAYS:
        return True
    return query_len >= policy.min_dense_rows and _dense_is_cheaper(query_len, kv_len, dims)


def choose_routes(
    host: HostLengths, dims: AttentionDims, policy: RoutePolicy | None = None
) -> tuple[Route, ...]:
    """One route a request. Raises GeometryError if a route hangs on an inexact length."""
    policy = policy or RoutePolicy()
    routes = []
    for b, (query_len, kv_len) in enumerate(zip(host.query_len, host.kv_len, strict=True)):
        asks = policy.dense is not DensePolicy.NEVER and query_len > policy.max_decode_rows
        if asks and not host.is_exact:
            raise GeometryError(
                f"request {b}: the route of {query_len} rows hangs on kv_len {kv_len}, which is "
                "only an upper bound; plan once the host knows it, raise max_decode_rows to the "
                "draft rows, or use dense='never'"
            )
        is_dense = asks and may_go_dense(query_len, kv_len, dims, policy)
        routes.append(Route.DENSE if is_dense else Route.SPARSE)
    return tuple(routes)


def _dense_is_cheaper(query_len: int, kv_len: int, dims: AttentionDims) -> bool:
    """Multiply-adds a head: expand all keys once, or absorb each query and read wide latents."""
    pairs = query_len * (2 * kv_len - query_len + 1) // 2  # causal (row, key) pairs
    latent, value = dims.kv_lora_rank, dims.v_head_dim
    expand = latent * (dims.qk_nope_head_dim + value)  # a key's K and V, or a row's q and output
    dense = kv_len * expand + pairs * (dims.qk_nope_head_dim + dims.qk_rope_head_dim + value)
    sparse = query_len * expand + pairs * (2 * latent + dims.qk_rope_head_dim)
    return dense <= sparse
