"""Attention of the torch provider: gather, batched matmuls, softmax; rows in blocks.

In:  queries, a pool with slots or plain keys and values. Out: (out, lse): out in the query's dtype,
lse natural log in fp32 (fp64 for fp64 queries); an empty row gives 0 and −inf.
A row's bits depend on its own data alone: its list is padded to a width that follows from its own
count, and products are batched by row. Half dtypes are computed in fp32.
Maths: oracle_math.md §1.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.providers.torch.norms import widen

GATHER_NUMBERS = 1 << 19  # numbers gathered at once: 2 MiB fp32, about a core's cache
BLOCK_ROWS = 64  # dense rows at once, so that a block skips the keys after its last row
EMPTY_NUMBERS = 1 << 16  # numbers that empty rows may gather for nothing, to save a regrouping
MIN_WIDTH = 16


def list_width(count: int) -> int:
    """The padded width of a list of ``count`` ids: 2^n or 1.5 · 2^n, at least 16; 0 for none."""
    if count == 0:
        return 0
    if count <= MIN_WIDTH:
        return MIN_WIDTH
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power


def sparse_mla(
    q_latent: Tensor,
    q_rope: Tensor,
    pool: PagedPool,
    slots: Tensor,
    count: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Row r attends the first count[r] of its slots [R, W] int64 (−1 behind)."""
    query = widen(torch.cat((q_latent, q_rope), -1)).mul_(scale)
    rank, counts = q_latent.shape[-1], count.tolist()
    widths = {list_width(n): n for n in sorted(set(counts), reverse=True)}  # with its least count
    num_empty = counts.count(0) if widths.pop(0, None) is not None else 0
    if len(widths) == 1:
        (width, least), *_ = widths.items()
        if num_empty * width * query.shape[-1] <= EMPTY_NUMBERS:
            lists = _Lists(slots, count, width, 0 if num_empty else least)
            out, lse = _attend_lists(query, pool, lists, rank)
            return out.to(q_latent.dtype), lse
    out = query.new_zeros(q_latent.shape)
    lse = query.new_full(q_latent.shape[:2], -torch.inf)
    for width, least in widths.items():
        rows = torch.tensor(
            [r for r, n in enumerate(counts) if list_width(n) == width], device=slots.device
        )
        part_query, part_slots, part_count = (
            t.index_select(0, rows) for t in (query, slots, count)
        )
        lists = _Lists(part_slots, part_count, width, least)
        part = _attend_lists(part_query, pool, lists, rank)
        out.index_copy_(0, rows, part[0])
        lse.index_copy_(0, rows, part[1])
    return out.to(q_latent.dtype), lse


def dense_mha(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Row m of q [M, H, D] attends the first visible[m] of k [N, H, D], v [N, H, Dv]."""
    query = widen(q).transpose(0, 1) * scale
    keys, values = widen(k).permute(1, 2, 0), widen(v).transpose(0, 1)
    num_heads, num_rows, _ = query.shape
    out = query.new_zeros(num_rows, num_heads, v.shape[-1])
    lse = query.new_full((num_rows, num_heads), -torch.inf)
    counts = visible.tolist()
    columns = torch.arange(k.shape[0], device=q.device)
    for start in range(0, num_rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, num_rows)
        most, least = max(counts[start:stop]), min(counts[start:stop])
        if most == 0:
            continue
        logits = torch.bmm(query[:, start:stop], keys[:, :, :most])
        if least < most:
            hidden = columns[least:most] >= visible[start:stop, None]
            logits[:, :, least:].masked_fill_(hidden, -torch.inf)
        weights, part_lse = _softmax(logits, has_empty=least == 0)
        out[start:stop] = torch.bmm(weights, values[:, :most]).transpose(0, 1)
        lse[start:stop] = part_lse.T
    return out.to(q.dtype), lse


def lse_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two partial results by their lse; (0, −inf) is the identity, to the bit."""
    largest = torch.maximum(lse_a, lse_b)
    anchor = largest.masked_fill(largest == -torch.inf, 0)
    weight_a, weight_b = (lse_a - anchor).exp_(), (lse_b - anchor).exp_()
    total = weight_a + weight_b
    lse = anchor + total.log()  # log 0 = −inf where both are empty
    share = total.masked_fill(total == 0, 1)[..., None]
    mixed = widen(out_a) * weight_a[..., None] + widen(out_b) * weight_b[..., None]
    return mixed.div_(share).to(out_a.dtype), lse


class _Lists(NamedTuple):
    """Lists of one padded width: slots [R, W], counts [R] of ``least`` .. ``width``."""

    slots: Tensor
    counts: Tensor
    width: int
    least: int


def _attend_lists(
    query: Tensor, pool: PagedPool, lists: _Lists, rank: int
) -> tuple[Tensor, Tensor]:
    """Scaled query [R, H, D] over lists, in blocks of rows."""
    slots, width, hidden = lists.slots, lists.width, None
    if slots.shape[1] < width:
        slots = F.pad(slots, (0, width - slots.shape[1]), value=-1)
    elif slots.shape[1] > width:
        slots = slots[:, :width]
    if lists.least < width:
        hidden = torch.arange(width, device=slots.device) >= lists.counts[:, None]
    kind = (rank, lists.least == 0)
    num_rows, _, dim = query.shape
    block = max(1, GATHER_NUMBERS // (width * dim))
    if num_rows <= block:
        return _attend_block(query, pool, slots, hidden, kind)
    blocks = (slice(i, i + block) for i in range(0, num_rows, block))
    parts = [
        _attend_block(query[r], pool, slots[r], None if hidden is None else hidden[r], kind)
        for r in blocks
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _attend_block(
    query: Tensor, pool: PagedPool, slots: Tensor, hidden: Tensor | None, kind: tuple[int, bool]
) -> tuple[Tensor, Tensor]:
    rank, has_empty = kind
    entries = pool.layout.gather(pool, slots).to(query.dtype)
    logits = torch.bmm(query, entries.mT)
    if hidden is not None:
        logits.masked_fill_(hidden[:, None], -torch.inf)
    weights, lse = _softmax(logits, has_empty)
    return torch.bmm(weights, entries[..., :rank]), lse


def _softmax(logits: Tensor, has_empty: bool) -> tuple[Tensor, Tensor]:
    """Softmax over the last dim and its lse, from one pass of exponentials.

    The largest weight is 1 / Σ exp(x − max), hence lse = max − log(largest weight).
    """
    weights = logits.softmax(-1)
    largest = logits.amax(-1)
    lse = largest - weights.amax(-1).log_()
    if has_empty:
        is_empty = largest == -torch.inf
        weights.masked_fill_(is_empty[..., None], 0)
        lse.masked_fill_(is_empty, -torch.inf)
    return weights, lse
