"""Index scores of the triton provider: contiguous and paged, of plain keys and of FP8 codes.

In:  index queries [M, H, D], head weights [M, H], keys [N, D] or a pool with pages, counts [M].
Out: fp32 scores [M, N], −inf from count[m] on; the `lazy_` forms leave those unwritten.
Under an `index_k` layout queries are codes times a power of two (KVLayout.rounds_queries): the
`_codes` kernels take the codes of queries and keys back exactly and multiply FP8 by FP8.
Fixed bits hang on the row, the key and the tile: `_fixed` tiles have one row, as paged ones do.
Not here: launches (index_launch.py), kernels, which form is bound (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnomon.attention.dispatch import OpNeed
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.triton.cache_gather import context_gather
from gnomon.attention.providers.triton.index_launch import (
    Scored,
    code_scores,
    paged_scores,
    plain_scores,
)
from gnomon.attention.providers.triton.index_views import (
    CODE,
    KEY_BLOCK,
    PAGED_TILES,
    TILES,
    encoded,
    gathered_codes,
    multiplies_codes,
    view_of,
)

Kernel = Callable[..., Any]


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float) -> Tensor:
    """scores[m, n] = scale · Σ_h weights[m, h] · relu(q[m, h] · keys[n]); −inf from count[m] on."""
    return plain_scores((q, weights, count, scale), keys, TILES[q.dtype], fills=True)


def index_scores_fixed(
    q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same with the bits of index_scores_paged."""
    return plain_scores((q, weights, count, scale), keys, PAGED_TILES[q.dtype], fills=True)


def index_scores_codes(
    q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same for queries and keys that are e4m3 codes times a power of two, FP8 by FP8."""
    return _codes_of_both((q, weights, count, scale), keys, is_fixed=False)


def index_scores_codes_fixed(
    q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same with the bits of index_scores_paged."""
    return _codes_of_both((q, weights, count, scale), keys, is_fixed=True)


def index_scores_paged(
    q: Tensor, weights: Tensor, pool: PagedPool, pages: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same for rows that each have their own pages [M, P]: [M, P * page_size]."""
    rows, width = RowPages(pages, None, pool.page_size), pages.shape[1] * pool.page_size
    return paged_scores((q, weights, count, scale), pool, rows, (width, -1), fills=True)


def lazy_scores_paged(
    q: Tensor,
    weights: Tensor,
    pool: PagedPool,
    rows: RowPages,
    count: Tensor,
    scale: float,
    limits: tuple[int, int],
) -> Tensor:
    """[M, width] with ``limits`` = (width, least); defined below count[m] where that > least."""
    return paged_scores((q, weights, count, scale), pool, rows, limits, fills=False)


def lazy_scores(
    q: Tensor,
    weights: Tensor,
    pool: PagedPool,
    pages: Tensor,
    num_keys: int,
    count: Tensor,
    scale: float,
) -> Tensor:
    """[M, num_keys] against entries 0 .. num_keys − 1 of ``pages`` [P]; defined below count[m]."""
    return _pool_scores((q, weights, count, scale), pool, pages, num_keys, False)


def lazy_scores_fixed(
    q: Tensor,
    weights: Tensor,
    pool: PagedPool,
    pages: Tensor,
    num_keys: int,
    count: Tensor,
    scale: float,
) -> Tensor:
    """The same with the bits of index_scores_paged."""
    return _pool_scores((q, weights, count, scale), pool, pages, num_keys, True)


def _pool_scores(
    scored: Scored, pool: PagedPool, pages: Tensor, num_keys: int, is_fixed: bool
) -> Tensor:
    if view_of(pool).kind != "codes":
        tile = (PAGED_TILES if is_fixed else TILES)[scored[0].dtype]
        keys = context_gather(pool, pages, 0, num_keys)
        return plain_scores(scored, keys, tile, fills=False)
    codes = gathered_codes(pool, pages, num_keys, KEY_BLOCK)
    tile = (PAGED_TILES if is_fixed else TILES)[CODE]
    return code_scores(scored, codes, num_keys, tile, fills=False)


def _codes_of_both(scored: Scored, keys: Tensor, is_fixed: bool) -> Tensor:
    q = scored[0]
    if not multiplies_codes(q.device):
        tile = (PAGED_TILES if is_fixed else TILES)[q.dtype]
        return plain_scores(scored, keys, tile, fills=True)
    codes, scales = encoded(keys[:, None], 1, KEY_BLOCK)
    tile = (PAGED_TILES if is_fixed else TILES)[CODE]
    return code_scores(scored, (codes[:, 0], scales), keys.shape[0], tile, fills=True)


def _for_codes(usual: Kernel, fixed: Kernel) -> Callable[[OpNeed], Kernel | None]:
    """The kernel to take where the index layout rounds queries; None elsewhere."""

    def choose(need: OpNeed) -> Kernel | None:
        if need.index_layout is None or not need.index_layout.startswith("index_k_"):
            return None
        return fixed if need.is_deterministic else usual

    return choose


KERNELS: dict[str, Kernel] = {
    "index_scores": index_scores,
    "index_scores_paged": index_scores_paged,
}
FIXED: dict[str, Kernel] = {"index_scores": index_scores_fixed}
VARIANTS: dict[str, Callable[[OpNeed], Kernel | None]] = {
    "index_scores": _for_codes(index_scores_codes, index_scores_codes_fixed)
}
FUSIONS: dict[str, Kernel] = {
    "lazy_scores": lazy_scores,
    "lazy_scores_paged": lazy_scores_paged,
}
FIXED_FUSIONS: dict[str, Kernel] = {"lazy_scores": lazy_scores_fixed}
