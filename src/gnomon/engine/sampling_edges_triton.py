"""sampling_filters.last_kept on a GPU: no sort, no question to the host.

In:  float32 logits [M, V] on the device, last dim contiguous; Filters there.
Out: int64 [M]: the last kept token of each row, as sampling_filters.py defines it.
Four launches. The best `NUM_LEADING` tokens of each row (the exact top-k of the attention kernels);
the mass of each block of the vocabulary; the edge among the leading ones, where it is there. Rows
whose edge lies beyond search the whole vocabulary, one program a row; on others it ends at once.
Search: logits as ordered integers; the largest one above which (itself included) lies enough is
found by bisecting, first for the number of tokens that top-k and min-p leave, then for top-p's
mass; among equal logits the last one kept is found by counting. Mass is float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.providers.triton.index_views import num_processors
from gnomon.attention.providers.triton.language import padded
from gnomon.attention.providers.triton.topk import forms, topk
from gnomon.attention.providers.triton.topk_bits import sort_key
from gnomon.engine.sampling_filters import Filters

NUM_LEADING = 1024
MASS_BLOCK = 1024
ROW_BLOCK = 4096
LOWEST = tl.constexpr(-2139095041)  # the key of −inf


@triton.jit
def weights_of(value, largest, temperature, min_p):
    """float64 mass of fp32 logits relative to the best; 0 below min_p times the best."""
    weight = tl.exp((value.to(tl.float64) - largest.to(tl.float64)) / temperature)
    return tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def middle(low, high):
    """Above low, up to high."""
    return low + (high - low + 1) // 2


@triton.jit
def tokens_of_mass(missing, weight, most):
    """How many tokens of this weight it takes to fill the missing mass: 1 to most."""
    needed = tl.ceil(missing / weight)
    return tl.maximum(tl.minimum(needed, most.to(tl.float64)), 1.0).to(tl.int32)


@triton.jit
def logit_of(key):
    """The fp32 logit of a key."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def block_mass_kernel(
    logits, largest, temperatures, min_ps, mass, stride, V, num_blocks, BLOCK: tl.constexpr
):
    """The mass of one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + token, mask=token < V, other=float("-inf"))
    weight = weights_of(
        value, tl.load(largest + row), tl.load(temperatures + row), tl.load(min_ps + row)
    )
    tl.store(mass + row * num_blocks + tl.program_id(1), tl.sum(weight, 0))


@triton.jit
def leading_edge_kernel(
    logits,
    leading,
    largest,
    mass,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    last,
    is_settled,
    stride,
    V,
    num_blocks,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The edge of one row if it lies among its K leading tokens, given by ascending ids."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(leading + row * K + tl.arange(0, K))
    value = tl.load(logits + row * stride + token)
    best = tl.load(largest + row)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    weight = weights_of(value, best, temperature, min_p)
    key = sort_key(value).to(tl.int64)
    lowest, highest = tl.min(key, 0), tl.max(key, 0)

    num_left = tl.sum((weight > 0).to(tl.int32), 0)
    is_closed = (top_k <= K) | (num_left < K)
    kept = tl.minimum(top_k, num_left.to(tl.int64)).to(tl.int32)
    edge, high, above = lowest, highest, 0
    while edge < high:
        mid = middle(edge, high)
        count = tl.sum((key >= mid).to(tl.int32), 0)
        if count >= kept:
            edge = mid
        else:
            high = mid - 1
            above = count
    equals = kept - above

    over = tl.sum(tl.where(key > edge, weight, 0.0), 0)
    at_edge = weights_of(logit_of(edge), best, temperature, min_p)
    total = over + equals.to(tl.float64) * at_edge
    block = tl.arange(0, BLOCKS)
    parts = tl.load(mass + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    cut = top_p * tl.where(is_closed, total, tl.sum(parts, 0))
    has_mass = (top_k >= V) & (top_p < 1.0) & (total >= cut)
    tl.store(is_settled + row, is_closed | has_mass)
    if top_p < 1.0:
        low, high, over = edge, highest, cut * 0.0
        while low < high:
            mid = middle(low, high)
            found = tl.sum(tl.where(key >= mid, weight, 0.0), 0)
            if found >= cut:
                low = mid
            else:
                high = mid - 1
                over = found
        most = tl.where(low == edge, equals, tl.sum((key == low).to(tl.int32), 0))
        single = weights_of(logit_of(low), best, temperature, min_p)
        equals = tokens_of_mass(cut - over, single, most)
        edge = low
    is_equal = key == edge
    rank = tl.cumsum(is_equal.to(tl.int32), 0)
    tl.store(last + row, tl.max(tl.where(is_equal & (rank <= equals), token, 0), 0).to(tl.int64))


@triton.jit
def count_from(row_logits, edge, V, BLOCK: tl.constexpr):
    """Tokens of a row whose key is at least `edge`."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        value = tl.load(row_logits + token, mask=token < V, other=float("-inf"))
        count += ((sort_key(value) >= edge) & (token < V)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def count_with_mass(row_logits, best, temperature, min_p, V, BLOCK: tl.constexpr):
    """Tokens of a row that min_p leaves."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        value = tl.load(row_logits + token, mask=token < V, other=float("-inf"))
        count += (weights_of(value, best, temperature, min_p) > 0).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def mass_from(row_logits, edge, best, temperature, min_p, V, BLOCK: tl.constexpr):
    """Mass of a row's tokens whose key is at least `edge`."""
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        value = tl.load(row_logits + token, mask=token < V, other=float("-inf"))
        weight = weights_of(value, best, temperature, min_p)
        mass += tl.where(sort_key(value) >= edge, weight, 0.0)
    return tl.sum(mass, 0)


@triton.jit
def whole_edge_kernel(
    logits,
    largest,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    last,
    is_settled,
    stride,
    V,
    BLOCK: tl.constexpr,
):
    """The edge of one row that is not settled, in its whole vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_settled + row) == 0:
        source = logits + row * stride
        best = tl.load(largest + row)
        temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        highest = sort_key(best).to(tl.int64)
        num_left = count_with_mass(source, best, temperature, min_p, V, BLOCK)
        kept = tl.minimum(top_k, num_left.to(tl.int64)).to(tl.int32)
        edge, high, above = highest * 0 + LOWEST, highest, 0
        while edge < high:
            mid = middle(edge, high)
            count = count_from(source, mid, V, BLOCK)
            if count >= kept:
                edge = mid
            else:
                high = mid - 1
                above = count
        equals = kept - above
        if top_p < 1.0:
            over = mass_from(source, edge + 1, best, temperature, min_p, V, BLOCK)
            at_edge = weights_of(logit_of(edge), best, temperature, min_p)
            cut = top_p * (over + equals.to(tl.float64) * at_edge)
            low, high, over = edge, highest, cut * 0.0
            while low < high:
                mid = middle(low, high)
                found = mass_from(source, mid, best, temperature, min_p, V, BLOCK)
                if found >= cut:
                    low = mid
                else:
                    high = mid - 1
                    over = found
            single = weights_of(logit_of(low), best, temperature, min_p)
            most = tl.where(low == edge, equals, V)
            equals = tokens_of_mass(cut - over, single, most)
            edge = low
        seen, found_id = 0, 0
        for first in range(0, V, BLOCK):
            token = first + tl.arange(0, BLOCK)
            value = tl.load(source + token, mask=token < V, other=float("-inf"))
            is_equal = (sort_key(value) == edge) & (token < V)
            rank = seen + tl.cumsum(is_equal.to(tl.int32), 0)
            here = tl.max(tl.where(is_equal & (rank <= equals), token, 0), 0)
            found_id = tl.maximum(found_id, here)
            seen += tl.sum(is_equal.to(tl.int32), 0)
        tl.store(last + row, found_id)


def numbers_of_rows(logits: Tensor, most_rows: int) -> list[int]:
    """Numbers of rows up to ``most_rows`` that between them launch every form; logits [1, V]."""
    num_tokens = logits.shape[-1]
    leads, processors = num_leading(num_tokens), num_processors(logits.device)
    return [rows for rows, _ in forms(leads, most_rows, num_tokens, processors)]


def num_leading(num_tokens: int) -> int:
    """How many of a row's tokens are looked at first."""
    return min(NUM_LEADING, padded(num_tokens + 1) // 2)


def last_kept(logits: Tensor, filters: Filters) -> Tensor:
    """One token id per row (module docstring); waits for nothing."""
    num_rows, num_tokens = logits.shape
    device, leads = logits.device, num_leading(num_tokens)
    count = torch.full((num_rows,), num_tokens, dtype=torch.int32, device=device)
    leading = topk(logits, count, leads).ids
    largest = logits.amax(-1)
    num_blocks = -(-num_tokens // MASS_BLOCK)
    mass = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=device)
    last = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_settled = torch.empty(num_rows, dtype=torch.bool, device=device)
    wishes = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
    stride = logits.stride(0)
    block_mass_kernel[(num_rows, num_blocks)](
        logits, largest, filters.temperature, filters.min_p, mass, stride, num_tokens, num_blocks,
        BLOCK=MASS_BLOCK,
    )  # fmt: skip
    leading_edge_kernel[(num_rows,)](
        logits, leading, largest, mass, *wishes, last, is_settled, stride, num_tokens, num_blocks,
        K=leads, BLOCKS=padded(num_blocks, 16),
    )  # fmt: skip
    whole_edge_kernel[(num_rows,)](
        logits, largest, *wishes, last, is_settled, stride, num_tokens,
        BLOCK=min(ROW_BLOCK, padded(num_tokens, 16)), num_warps=16,
    )  # fmt: skip
    return last
