"""Reference cache writers and readers: transform in float64, one token after the other.

In:  raw latents and index queries and keys, slots (−1 writes nothing). Out: bytes of a pool, which
only its layout touches, and transformed queries. Maths: oracle_math.md §1.2, §1.3, §1.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.providers.reference.norms import hadamard, layer_norm, rms_norm, rope


def latent_write(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rows: RopeRows,
    pool: PagedPool,
    slots: Tensor,
) -> None:
    """Write [rms_norm(c) | rope(kr)] of kv [N, D_c + D_r]; the key part kr is not normalised."""
    rank = norm_weight.shape[0]
    wide = kv.double()
    latent = rms_norm(wide[:, :rank], norm_weight, eps)
    values = torch.cat((latent, rope(wide[:, rank:], rows)), dim=-1).to(kv.dtype)
    _write_one_by_one(pool, slots, values)


def index_prepare(
    q: Tensor,
    k: Tensor,
    transform: IndexTransform,
    rows: tuple[RopeRows, RopeRows],
    pool: PagedPool,
    slots: Tensor,
) -> Tensor:
    """Rope (and Hadamard) both; LayerNorm the keys k [N, Di] first and write them to the pool.

    Queries come back as the pool's layout has them scored (KVLayout.round_queries).
    """
    query = rope(q.double(), rows[0])
    key = layer_norm(k.double(), transform.norm_weight, transform.norm_bias, transform.norm_eps)
    key = rope(key, rows[1])
    if transform.has_hadamard:
        query, key = hadamard(query), hadamard(key)
    _write_one_by_one(pool, slots, key.to(k.dtype))
    return pool.layout.round_queries(query.to(q.dtype))


def context_gather(pool: PagedPool, pages: Tensor, start: int, length: int) -> Tensor:
    """Entries start .. start + length − 1 of the request that owns ``pages`` [P] → [length, D]."""
    size = pool.page_size
    slots = [
        int(pages[position // size]) * size + position % size
        for position in range(start, start + length)
    ]
    return pool.layout.gather(pool, torch.tensor(slots, dtype=torch.int64, device=pages.device))


def _write_one_by_one(pool: PagedPool, slots: Tensor, values: Tensor) -> None:
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            pool.layout.write(pool, slots[row : row + 1], values[row : row + 1])
