"""Pairs (row, place) sorted by expert, in blocks that belong to one expert each; all on the device.

In:  expert ids [R, k], −1 for none. Pair p is row p // k, place p % k.
Out: ExpertBlocks: pairs [blocks * BM] int32, each expert's pairs in ascending order and filled up
     to whole blocks with the number of pairs R * k; the expert of every block; how many blocks are
     used (on the device). Buffers are as large as the worst case, which R, k, E and BM decide.
Few pairs take one launch (every expert's program counts all ids), many take three: counts of each
chunk, the places where each chunk's pairs of an expert begin, and the pairs. No atomics.
Not here: the products (products.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.providers.triton.language import padded

FEW_PAIRS = 4096
CHUNK = 1024
BLOCKS_AT_ONCE = 16  # of row blocks whose expert and tail one program writes


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """``most``: blocks that there may be; ``num_blocks`` int32 [1]: blocks that there are.

    ``rows``: pairs of a block, live or not.
    """

    pairs: Tensor
    expert: Tensor
    num_blocks: Tensor
    most: int
    rows: int


@triton.jit
def count_ids(ids, first, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """int32 [EXPERTS]: how often each expert is named among pairs first .. first + CHUNK − 1."""
    at = first + tl.arange(0, CHUNK)
    chosen = tl.load(ids + at, mask=at < num_pairs, other=-1).to(tl.int32)
    return tl.histogram(tl.maximum(chosen, 0), EXPERTS, mask=chosen >= 0)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_few(
    ids, pairs, expert_of_block, num_blocks, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """One program an expert: counts everything, writes its own blocks."""
    me = tl.program_id(0)
    count = tl.zeros((EXPERTS,), tl.int32)
    for first in tl.range(0, num_pairs, CHUNK):
        count += count_ids(ids, first, num_pairs, EXPERTS, CHUNK)
    expert = tl.arange(0, EXPERTS)
    blocks = (count + BM - 1) // BM
    first_block = tl.sum(tl.where(expert < me, blocks, 0))
    my_blocks = tl.sum(tl.where(expert == me, blocks, 0))
    my_count = tl.sum(tl.where(expert == me, count, 0))
    tl.store(num_blocks, tl.sum(blocks), mask=me == 0)
    begin = first_block * BM
    done = 0
    for first in tl.range(0, num_pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        chosen = tl.load(ids + at, mask=at < num_pairs, other=-1).to(tl.int32)
        is_mine = chosen == me
        place = begin + done + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(pairs + place, at, mask=is_mine)
        done += tl.sum(is_mine.to(tl.int32))
    tail = my_count + tl.arange(0, BM)
    tl.store(pairs + begin + tail, num_pairs, mask=tail < my_blocks * BM)
    for block in tl.range(0, my_blocks):
        tl.store(expert_of_block + first_block + block, me)


@triton.jit(do_not_specialize=["num_pairs"])
def count_chunks(ids, counts, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Counts [chunks, EXPERTS]: ids of each chunk."""
    chunk = tl.program_id(0)
    count = count_ids(ids, chunk * CHUNK, num_pairs, EXPERTS, CHUNK)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), count)


@triton.jit(do_not_specialize=["num_chunks"])
def place_chunks(
    counts, totals, num_blocks, num_chunks, EXPERTS: tl.constexpr, BM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program: counts become the place of each chunk's first pair of each expert.

    The place is less by how many pairs of lower experts the chunk has, so that a pair's place is
    the table's entry plus its number in the chunk sorted by expert. ``totals`` [2, EXPERTS]: pairs
    of an expert, and its end in blocks.
    """
    expert = tl.arange(0, EXPERTS)
    tile = tl.arange(0, TILE)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in tl.range(0, num_chunks, TILE):
        chunk = first + tile
        at = chunk[:, None] * EXPERTS + expert[None, :]
        total += tl.sum(tl.load(counts + at, mask=(chunk < num_chunks)[:, None], other=0), 0)
    blocks = (total + BM - 1) // BM
    end = tl.cumsum(blocks, 0)
    tl.store(totals + expert, total)
    tl.store(totals + EXPERTS + expert, end)
    tl.store(num_blocks, tl.sum(blocks))
    begin = (end - blocks) * BM
    for first in tl.range(0, num_chunks, TILE):
        chunk = first + tile
        at = chunk[:, None] * EXPERTS + expert[None, :]
        is_in = (chunk < num_chunks)[:, None]
        count = tl.load(counts + at, mask=is_in, other=0)
        before = tl.cumsum(count, 0) - count
        lower = tl.cumsum(count, 1) - count
        tl.store(counts + at, begin[None, :] + before - lower, mask=is_in)
        begin += tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "most"])
def write_pairs(
    ids, places, totals, pairs, expert_of_block, num_pairs, num_chunks, most,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The first programs write a chunk's pairs each, the others the tails of blocks."""
    pid = tl.program_id(0)
    if pid < num_chunks:
        number = tl.arange(0, CHUNK)
        at = pid * CHUNK + number
        chosen = tl.load(ids + at, mask=at < num_pairs, other=-1).to(tl.int32)
        # Pairs without an expert go to the end; a key's low digits keep the order of the others.
        key = tl.where(chosen >= 0, chosen, EXPERTS) * CHUNK + number
        ordered = tl.sort(key)
        chosen = ordered // CHUNK
        is_named = chosen < EXPERTS
        place = tl.load(places + pid * EXPERTS + chosen, mask=is_named, other=0) + number
        tl.store(pairs + place, pid * CHUNK + ordered % CHUNK, mask=is_named)
    else:
        block = (pid - num_chunks) * BLOCKS + tl.arange(0, BLOCKS)
        expert = tl.arange(0, EXPERTS)
        end = tl.load(totals + EXPERTS + expert)
        owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), 1)
        is_used = owner < EXPERTS
        tl.store(expert_of_block + block, owner, mask=is_used & (block < most))
        owner = tl.where(is_used, owner, 0)
        count = tl.load(totals + owner)
        start = tl.load(totals + EXPERTS + owner) - (count + BM - 1) // BM
        inside = (block - start)[:, None] * BM + tl.arange(0, BM)[None, :]
        tail = block[:, None] * BM + tl.arange(0, BM)[None, :]
        is_tail = is_used[:, None] & (inside >= count[:, None])
        tl.store(pairs + tail, num_pairs, mask=is_tail)


def most_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Blocks of the worst case: every expert named has a block that is not full."""
    named = min(num_pairs, num_experts)
    return (num_pairs + named * (block - 1)) // block


def sort_by_expert(expert_ids: Tensor, num_experts: int, block: int) -> ExpertBlocks:
    """Blocks of ``block`` pairs; expert_ids [R, k] of at least one pair."""
    ids = expert_ids.contiguous()
    num_pairs, device = ids.numel(), ids.device
    most = most_blocks(num_pairs, num_experts, block)
    aligned = -(-most // 4) * 4  # kernels are compiled apart for addresses that are not
    buffer = torch.empty(most * block + aligned + 1, dtype=torch.int32, device=device)
    pairs, expert, num_blocks = buffer.split([most * block, aligned, 1])
    width = padded(num_experts, 16)
    if num_pairs <= FEW_PAIRS:
        chunk = min(padded(num_pairs, 32), CHUNK)
        sort_few[(num_experts,)](
            ids, pairs, expert, num_blocks, num_pairs, width, chunk, block, num_warps=4
        )
        return ExpertBlocks(pairs, expert, num_blocks, most, block)
    num_chunks = triton.cdiv(num_pairs, CHUNK)
    counts = torch.empty(num_chunks + 2, width, dtype=torch.int32, device=device)
    totals = counts[num_chunks:]
    count_chunks[(num_chunks,)](ids, counts, num_pairs, width, CHUNK)
    tile = max(1, 4096 // width)
    place_chunks[(1,)](counts, totals, num_blocks, num_chunks, width, block, tile, num_warps=8)
    grid = (num_chunks + triton.cdiv(most, BLOCKS_AT_ONCE),)
    write_pairs[grid](
        ids, counts, totals, pairs, expert, num_pairs, num_chunks, most,
        width, CHUNK, block, BLOCKS_AT_ONCE,
    )  # fmt: skip
    return ExpertBlocks(pairs, expert, num_blocks, most, block)
