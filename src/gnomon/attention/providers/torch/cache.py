"""Cache writers and readers of the torch provider: transform all rows at once, write through the
layout.

In:  raw latents, index queries and keys on their rows, slots (−1 writes nothing).
Out: bytes of a pool, which only its layout touches; transformed index queries; gathered entries.
Half dtypes stay fp32 from the norm to the end and are rounded once. Maths: oracle_math.md §1.2–1.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.providers.torch.norms import layer_norm, rms_norm, rope, widen

FEW_ROWS = 64


def latent_write(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rows: RopeRows,
    pool: PagedPool,
    slots: Tensor,
) -> None:
    """Write [rms_norm(c) | rope(kr)] of kv [N, D_c + D_r] at slots [N]."""
    rank = norm_weight.shape[0]
    wide = widen(kv)
    latent = rms_norm(wide[:, :rank], norm_weight, eps)
    values = torch.cat((latent, rope(wide[:, rank:], rows)), -1)
    pool.layout.write(pool, slots, values.to(kv.dtype))


def index_prepare(
    q: Tensor,
    k: Tensor,
    transform: IndexTransform,
    rows: tuple[RopeRows, RopeRows],
    pool: PagedPool,
    slots: Tensor,
) -> Tensor:
    """Norm the keys k [N, Di], rotate (and Hadamard) both, write the keys, return the queries.

    Queries come back as the pool's layout has them scored (KVLayout.round_queries).
    """
    wide_k = layer_norm(widen(k), transform.norm_weight, transform.norm_bias, transform.norm_eps)
    if rows[0] is rows[1] and q.shape[0] <= FEW_ROWS:
        # Same rows, same rotation: the key goes along as one more head. Saves calls, costs a copy.
        both = _turn(torch.cat((widen(q), wide_k[:, None]), 1), rows[0], transform)
        query, key = both[:, :-1].contiguous(), both[:, -1]
    else:
        query = _turn(widen(q), rows[0], transform)
        key = _turn(wide_k[:, None], rows[1], transform)[:, 0]
    pool.layout.write(pool, slots, key.to(k.dtype))
    return pool.layout.round_queries(query.to(q.dtype))


def context_gather(pool: PagedPool, pages: Tensor, start: int, length: int) -> Tensor:
    """Entries start .. start + length − 1 of the request that owns ``pages`` [P]."""
    return pool.layout.gather_range(pool, pages, start, length)


def _turn(x: Tensor, rows: RopeRows, transform: IndexTransform) -> Tensor:
    turned = rope(x, rows)
    if transform.hadamard is None:
        return turned
    # Batched by row, so that a row's bits do not depend on how many rows there are.
    matrix = transform.hadamard.to(turned.dtype)
    return torch.bmm(turned, matrix.expand(turned.shape[0], -1, -1))
