"""Index scores of the torch provider, in blocks that fit the cache.

In:  index queries, head weights, keys or pages. Out: scores (fp32; fp64 for fp64 queries).
The `_fixed` kernels keep bits apart: in fp32 those of a score depend neither on the other rows nor
on the keys beside it, so chunked, paged and whole scores are equal bit for bit.
Maths: oracle_math.md §1.5.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.attention.layouts.base import Operation, PagedPool
from gnomon.attention.providers.torch.norms import widen

BLOCK_NUMBERS = 1 << 19  # per-head scores held at once: 2 MiB fp32, about a core's cache
# A product of one row by a matrix rounds by the matrix' width, one of four rows does not (fp32).
FIXED_ROWS = 4
FEWEST_HEADS = 8  # below, the same
SMALL_PRODUCT = 400  # torch multiplies batched matrices of fewer products in another order
FEWEST_GEMM_ROWS = 16  # below, a plain matmul takes another path than the batched one


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float) -> Tensor:
    """scores[m, n] = scale · Σ_h weights[m, h] · relu(q[m, h] · keys[n]); −inf from count[m] on."""
    q = widen(q)
    return _scores(q, _scaled(weights, scale, q.dtype), keys.to(q.dtype), count)


def index_scores_fixed(
    q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same with bits that hang on the row and the key alone."""
    q, scaled = _fixed_query(q, weights, scale)
    num_keys, fewest = keys.shape[0], _fewest_columns(q.shape[1])
    keys = _at_least(keys.to(q.dtype), fewest)
    return _scores(q, scaled, keys, count, fewest)[:, :num_keys]


def index_scores_paged(
    q: Tensor, weights: Tensor, pool: PagedPool, pages: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same for rows that each have their own pages [M, P]: [M, P * page_size]."""
    q = widen(q)
    keys = _gather_pages(pool, pages).to(q.dtype)
    return _scores_of_rows(q, _scaled(weights, scale, q.dtype), keys, count)


def index_scores_paged_fixed(
    q: Tensor, weights: Tensor, pool: PagedPool, pages: Tensor, count: Tensor, scale: float
) -> Tensor:
    """The same with bits that hang on the row and the key alone."""
    q, scaled = _fixed_query(q, weights, scale)
    keys = _gather_pages(pool, pages).to(q.dtype)
    num_keys = keys.shape[1]
    keys = _at_least(keys, _fewest_columns(q.shape[1]))
    return _scores_of_rows(q, scaled, keys, count)[:, :num_keys]


def _scores(q: Tensor, scaled: Tensor, keys: Tensor, count: Tensor, fewest: int = 0) -> Tensor:
    """[M, N] of q [M, Hi, D], scaled [M, n, Hi] (equal rows, the first is read), keys [N, D].

    At least ``fewest`` keys take part in a product.
    """
    num_rows, num_heads = q.shape[:2]
    num_keys = keys.shape[0]
    most = max(1, BLOCK_NUMBERS // max(1, num_heads * num_keys))
    counts = count.tolist()
    if num_rows <= most and min(counts, default=0) >= num_keys:
        return torch.bmm(scaled, _head_scores(q, keys))[:, 0]
    block = min(most, -(-num_rows // 2) or 1)  # earlier rows see fewer keys, as a rule
    scores = q.new_empty(num_rows, num_keys)
    columns = torch.arange(num_keys, device=q.device)
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        seen = min(max(counts[start:stop]), num_keys)
        least = min(min(counts[start:stop]), seen)
        part = scores[start:stop]
        if seen:
            heads = _head_scores(q[start:stop], keys[: max(seen, fewest)])
            part[:, :seen] = torch.bmm(scaled[start:stop], heads)[:, 0, :seen]
        if seen < num_keys:
            part[:, seen:] = -torch.inf
        if least < seen:
            hidden = columns[least:seen] >= count[start:stop, None]
            part[:, least:seen].masked_fill_(hidden, -torch.inf)
    return scores


def _scores_of_rows(q: Tensor, scaled: Tensor, keys: Tensor, count: Tensor) -> Tensor:
    """[M, N] of keys [M, N, D], each row's own."""
    heads = torch.bmm(q, keys.mT).relu_()
    scores = torch.bmm(scaled, heads)[:, 0]
    hidden = torch.arange(keys.shape[1], device=q.device) >= count[:, None]
    return scores.masked_fill_(hidden, -torch.inf)


def _gather_pages(pool: PagedPool, pages: Tensor) -> Tensor:
    """All entries of pages [M, P]: [M, P * page_size, D]; what null pages hold is left to masks."""
    num_rows, num_pages = pages.shape
    size = pool.page_size
    if Operation.TYPED_VIEW in pool.layout.operations:
        whole = pool.typed_pages().index_select(0, pages.reshape(-1))
        return whole.view(num_rows, num_pages * size, pool.layout.dim)
    inside = torch.arange(size, device=pages.device)
    slots = (pages.long()[:, :, None] * size + inside).view(num_rows, num_pages * size)
    return pool.layout.gather(pool, slots)


def _fixed_query(q: Tensor, weights: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns q with FEWEST_HEADS heads at least, and scaled weights as FIXED_ROWS equal rows."""
    q = widen(q)
    missing = max(0, FEWEST_HEADS - q.shape[1])
    scaled = _scaled(weights, scale, q.dtype).expand(-1, FIXED_ROWS, -1)
    return (F.pad(q, (0, 0, 0, missing)), F.pad(scaled, (0, missing))) if missing else (q, scaled)


def _fewest_columns(num_heads: int) -> int:
    """How many keys a weighted sum over heads takes at least, so as to take the usual path."""
    return max(16, -(-SMALL_PRODUCT // (FIXED_ROWS * num_heads)))


def _at_least(keys: Tensor, num_keys: int) -> Tensor:
    missing = num_keys - keys.shape[-2]
    return F.pad(keys, (0, 0, 0, missing)) if missing > 0 else keys


def _scaled(weights: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (weights.to(dtype) * scale)[:, None]


def _head_scores(q: Tensor, keys: Tensor) -> Tensor:
    num_rows, num_heads, dim = q.shape
    if num_rows * num_heads < FEWEST_GEMM_ROWS:
        return torch.bmm(q, keys.mT.expand(num_rows, -1, -1)).relu_()
    similarity = torch.mm(q.reshape(-1, dim), keys.mT)
    return similarity.view(num_rows, num_heads, -1).relu_()
