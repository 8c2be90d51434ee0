"""Device kernel of the exact top-k of few long rows: programs side by side sift a row.

In:  fp32 scores, a count per row. Out: a scratch row for each, in which one program of
     topk_settle.py finds the answer.
A program has a part of a row. Every program of a row searches the same sample, finds the same key,
     marks the columns of its part above and at that key, a bit each, and gathers what it marked:
     keys and ids, in order. Rows of at most CAP columns are left alone.
Kept columns of a part are padded to whole groups of 4, with BELOW, so that they are read 16 bytes
     at once. Not here: sizes, launches (topk.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.topk_bits import (
    BELOW,
    WORD,
    locate,
    num_bits,
    rank_words,
    sort_key,
)
from gnomon.attention.providers.triton.topk_search import sampled_pivot

FOUR = tl.constexpr(4)
PLANES = tl.constexpr(8)  # of PARTS numbers: kept, above, whether NaN, pivot, where a part begins


@triton.jit
def part_of(length, num_parts, BLOCK: tl.constexpr):
    """Columns of each part of a row, whole blocks."""
    return tl.cdiv(tl.cdiv(length, BLOCK), num_parts) * BLOCK


@triton.jit
def places_of(scratch_ptr, row, scratch_row, most_words, CAP: tl.constexpr, PARTS: tl.constexpr):
    """(numbers, words, ties, prefix, ids that were found, keys kept by the parts) of a row.

    Words of what is kept follow the prefix.
    """
    meta = scratch_ptr + tl.cast(row, tl.int64) * scratch_row
    words = meta + PLANES * PARTS
    found_ids = words + 4 * most_words
    return meta, words, words + most_words, words + 2 * most_words, found_ids, found_ids + CAP


@triton.jit(
    do_not_specialize=["num_columns", "scratch_row", "most_words", "region", "top"],
    do_not_specialize_on_alignment=["count_ptr"],
)
def topk_parts_kernel(
    scores_ptr,
    count_ptr,
    scratch_ptr,
    num_columns,
    scores_row,
    scratch_row,
    most_words,
    region,
    top,
    target,
    CAP: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Program (p, m): the p-th part of row m, if the row has more than CAP columns.

    region: columns that are kept of a part at most; a multiple of 4. PARTS: at least the parts.
    top: a power of two, at least half of a part's words. CHUNK: words counted, columns gathered.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    part, row, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    length = tl.minimum(tl.load(count_ptr + row), num_columns)
    share = part_of(length, num_parts, BLOCK)
    first = part * share
    if (length > CAP) & (first < length):
        meta, words, ties, prefix, _, kept = places_of(
            scratch_ptr, row, scratch_row, most_words, CAP, PARTS
        )
        prefix += first // WORD
        passed = prefix + most_words
        kept_keys = kept + tl.cast(part, tl.int64) * region
        kept_ids = kept_keys + tl.cast(num_parts, tl.int64) * region
        row_ptr = scores_ptr + tl.cast(row, tl.int64) * scores_row
        last = tl.minimum(first + share, length)
        group, lane = tl.arange(0, BLOCK // WORD), tl.arange(0, WORD)
        inner = group[:, None] * WORD + lane[None, :]
        bit = (tl.full([WORD], 1, tl.int32) << lane)[None, :]
        x = tl.load(row_ptr + first + inner, mask=first + inner < last, other=0.0)
        rank = tl.maximum((target * SAMPLE / length.to(tl.float32)).to(tl.int32), 1)
        pivot, _ = sampled_pivot(row_ptr, length, rank, SAMPLE, 2)
        above = tl.zeros([BLOCK // WORD], tl.int32)
        largest = tl.full([BLOCK // WORD, WORD], float("-inf"), tl.float32)
        for start in range(first, last, BLOCK):
            column = start + inner
            keys = tl.where(column < last, sort_key(x), BELOW)
            largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
            ahead = column + BLOCK
            x = tl.load(row_ptr + ahead, mask=ahead < last, other=0.0)
            word = tl.sum(tl.where(keys > pivot, bit, 0), 1)
            tie = tl.sum(tl.where(keys == pivot, bit, 0), 1)
            at = start // WORD + group
            is_word = at * WORD < last
            tl.store(words + at, word, mask=is_word)
            tl.store(ties + at, tie, mask=is_word)
            tl.store(passed + (at - first // WORD), word | tie, mask=is_word)
            above += num_bits(word.to(tl.uint32, bitcast=True))
        has_nan = tl.max(tl.max((largest != largest).to(tl.int32), 1), 0)
        num_words = tl.cdiv(last - first, WORD)
        tl.debug_barrier()
        taken = rank_words(passed, passed, prefix, num_words, 0, False, CHUNK)
        tl.debug_barrier()
        for start in range(0, tl.minimum(taken, region), CHUNK):
            place = start + tl.arange(0, CHUNK)
            is_kept = place < tl.minimum(taken, region)
            at = locate(tl.minimum(place, taken - 1), passed, prefix, num_words, top)
            key = sort_key(tl.load(row_ptr + first + at))
            tl.store(kept_keys + place, key, mask=is_kept)
            tl.store(kept_ids + place, first + at, mask=is_kept)
        place = taken + tl.arange(0, FOUR)
        is_pad = (place < tl.cdiv(taken, FOUR) * FOUR) & (place < region)
        tl.store(kept_keys + place, BELOW, mask=is_pad)
        tl.store(meta + part, taken)
        tl.store(meta + PARTS + part, tl.sum(above, 0))
        tl.store(meta + 2 * PARTS + part, has_nan)
        tl.store(meta + 3 * PARTS + part, pivot)
