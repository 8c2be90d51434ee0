"""Device kernel of the exact top-k: guess a threshold, mark what passes it, settle the rest.

In:  fp32 scores, a count per row. Out: ids ascending by column, −1 behind, flags, margin, slots.
Guess: a sample of the row, SAMPLE columns in groups of 4 spread evenly, is bisected for the key
     that about TARGET columns of the row should pass. One pass over the row then marks those that
     do: a bit a column, with no order between the warps, and the bits are counted.
Exact: if more than K and at most CAP passed, the answer lies among them: their keys are bisected
     until exactly K are at or above a key, or a tie is left, of which the lower columns are taken.
     Otherwise another guess is made, at most TRIES in all, and then the whole row is bisected, a
     pass per bit: slow, but no distribution of scores can make it wrong.
A row that sees at most K columns takes all of them. Not here: sizes, outputs, launches (topk.py),
keys and bits (topk_bits.py). The rule for ties and NaN: design.md §5.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.topk_bits import (
    BELOW,
    HIGHEST,
    LOWEST,
    WORD,
    hidden_zero,
    locate,
    mark_best,
    mark_scores,
    middle,
    rank_words,
    score_of,
    sort_key,
)

GROUP = tl.constexpr(4)
TRIES = tl.constexpr(3)
CHUNK = tl.constexpr(1024)  # words counted, or ids written, at once


@triton.jit
def load_keys(row_ptr, start, length, BLOCK: tl.constexpr):
    """Keys of columns start .. start + BLOCK − 1; BELOW past the row."""
    column = start + hidden_zero(length) + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < length, other=0.0)
    return tl.where(column < length, sort_key(x), BELOW)


@triton.jit
def bisect(keys, wanted, slack, low, at_low):
    """A key that wanted .. wanted + slack of ``keys`` reach, or the greatest that wanted reach.

    ``at_low`` of them, at least ``wanted``, reach ``low``.
    """
    high = tl.max(keys, 0) + 1
    while (low + 1 < high) & (at_low > wanted + slack):
        pivot = middle(low, high)
        reached = tl.sum((keys >= pivot).to(tl.int32), 0)
        is_low = reached >= wanted
        low = tl.where(is_low, pivot, low)
        high = tl.where(is_low, high, pivot)
        at_low = tl.where(is_low, reached, at_low)
    return low


@triton.jit
def sampled_pivot(row_ptr, length, rank, SAMPLE: tl.constexpr):
    """A key that about ``rank`` of SAMPLE columns of the row reach."""
    place = hidden_zero(length) + tl.arange(0, SAMPLE)
    group = (place // GROUP).to(tl.int64) * length // (SAMPLE // GROUP)
    x = tl.load(row_ptr + group + place % GROUP)
    low, at_low = tl.full([], LOWEST, tl.int32), tl.full([], SAMPLE, tl.int32)
    return bisect(sort_key(x), rank, rank // 8, low, at_low)


@triton.jit
def around(keys, low):
    """(how many keys lie above ``low``, how many at it, the least above, the greatest below)."""
    num_above = tl.sum((keys > low).to(tl.int32), 0)
    num_at = tl.sum((keys == low).to(tl.int32), 0)
    least = tl.min(tl.where(keys > low, keys, HIGHEST), 0)
    greatest = tl.max(tl.where(keys < low, keys, BELOW), 0)
    return num_above, num_at, least, greatest


@triton.jit
def around_in_row(row_ptr, length, low, BLOCK: tl.constexpr):
    """The same of all columns of the row."""
    num_above, num_at = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    least, greatest = tl.full([], HIGHEST, tl.int32), tl.full([], BELOW, tl.int32)
    for start in range(0, length, BLOCK):
        above, at, lower, upper = around(load_keys(row_ptr, start, length, BLOCK), low)
        num_above += above
        num_at += at
        least = tl.minimum(least, lower)
        greatest = tl.maximum(greatest, upper)
    return num_above, num_at, least, greatest


@triton.jit
def bisect_row(row_ptr, length, wanted, guess, BLOCK: tl.constexpr):
    """The greatest key that ``wanted`` columns of the row reach, or one that just so many reach."""
    low, at_low, high = tl.full([], LOWEST, tl.int32), length, tl.full([], HIGHEST + 1, tl.int32)
    pivot = guess + 1  # a tie at the guess is then found in one pass
    while (low + 1 < high) & (at_low > wanted):
        reached = tl.zeros([], tl.int32)
        for start in range(0, length, BLOCK):
            keys = load_keys(row_ptr, start, length, BLOCK)
            reached += tl.sum((keys >= pivot).to(tl.int32), 0)
        is_low = reached >= wanted
        low = tl.where(is_low, pivot, low)
        high = tl.where(is_low, high, pivot)
        at_low = tl.where(is_low, reached, at_low)
        is_guess = (high == guess + 1) & (low < guess)
        pivot = tl.where(is_guess, guess, middle(low, high))
    return low


@triton.jit
def put(place, ids, is_taken, ids_ptr, slots_ptr, pages_ptr, num_pages, PAGE: tl.constexpr):
    """Write ids, and their slots if there are pages, at their places of a row's list."""
    tl.store(ids_ptr + place, ids, mask=is_taken)
    if slots_ptr is not None:
        entry = tl.maximum(ids, 0)
        is_held = is_taken & (ids >= 0) & (entry // PAGE < num_pages)
        page = tl.load(pages_ptr + entry // PAGE, mask=is_held, other=0).to(tl.int64)
        slot = tl.where(page > 0, page * PAGE + entry % PAGE, -1)
        tl.store(slots_ptr + place, slot, mask=is_taken)


@triton.jit
def put_all(
    row_ptr,
    length,
    ids_ptr,
    slots_ptr,
    pages_ptr,
    num_pages,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """The list of a row that sees at most K columns; returns whether one is NaN, if LOOKS."""
    num_nan = tl.zeros([], tl.int32)
    for start in range(0, K, CHUNK):
        column = start + hidden_zero(length) + tl.arange(0, CHUNK)
        ids = tl.where(column < length, column, -1)
        put(column, ids, column < K, ids_ptr, slots_ptr, pages_ptr, num_pages, PAGE)
        if LOOKS:
            x = tl.load(row_ptr + column, mask=column < length, other=0.0)
            num_nan += tl.sum((x != x).to(tl.int32), 0)
    return num_nan > 0


@triton.jit
def gather_marked(row_ptr, total, words_ptr, prefix_ptr, num_words, top, ids_ptr, keys_ptr):
    """Columns and keys of all ``total`` marked columns of the row, in order."""
    for start in range(0, total, CHUNK):
        place = start + hidden_zero(total) + tl.arange(0, CHUNK)
        inside = place < total
        column = locate(tl.minimum(place, total - 1), words_ptr, prefix_ptr, num_words, top)
        tl.store(ids_ptr + place, column, mask=inside)
        tl.store(keys_ptr + place, sort_key(tl.load(row_ptr + column)), mask=inside)


@triton.jit
def topk_kernel(
    scores_ptr,
    count_ptr,
    ids_ptr,
    slots_ptr,
    kept_ptr,
    margin_ptr,
    nan_ptr,
    pages_ptr,
    request_ptr,
    scratch_ptr,
    num_rows,
    num_columns,
    num_pages,
    scores_row,
    ids_row,
    slots_row,
    pages_row,
    scratch_row,
    top,
    K: tl.constexpr,
    CAP: tl.constexpr,
    SAMPLE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """Rows p, p + programs, …; scratch_row: 2 · CAP and three times the words of a row.

    TARGET: columns to pass a guess. top: the largest power of two below the words of a row.
    LOOKS: rows that see at most K columns are searched for NaN, else their scores are not read.
    slots_ptr, margin_ptr: None where they are not wanted; request_ptr None: row m has pages[m].
    """
    found_ids = scratch_ptr + tl.program_id(0).to(tl.int64) * scratch_row
    found_keys = found_ids + CAP
    most_words = (scratch_row - 2 * CAP) // 3
    words = found_keys + CAP
    ties = words + most_words
    prefix = ties + most_words
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        length = tl.maximum(tl.minimum(tl.load(count_ptr + row), num_columns), 0)
        line = tl.cast(row, tl.int64)
        row_ptr = scores_ptr + line * scores_row
        out_ptr = ids_ptr + line * ids_row
        slot_ptr = slots_ptr
        page_ptr = pages_ptr
        if slots_ptr is not None:
            slot_ptr = slots_ptr + line * slots_row
            owner = line
            if request_ptr is not None:
                owner = tl.maximum(tl.load(request_ptr + row), 0).to(tl.int64)
            page_ptr = pages_ptr + owner * pages_row
        margin = tl.full([], float("inf"), tl.float32)
        if length <= K:
            has_nan = put_all(
                row_ptr, length, out_ptr, slot_ptr, page_ptr, num_pages, K, PAGE, LOOKS
            )
        else:
            rank = tl.maximum((TARGET * SAMPLE / length.to(tl.float32)).to(tl.int32), 1)
            pivot = tl.full([], LOWEST, tl.int32)
            total = tl.full([], CAP + 1, tl.int32)
            has_nan = tl.zeros([], tl.int1)
            tries = tl.zeros([], tl.int32)
            num_words = tl.cdiv(length, WORD)
            while (tries < TRIES) & ((total <= K) | (total > CAP)):
                if length > CAP:
                    pivot = sampled_pivot(row_ptr, length, rank, SAMPLE)
                tl.debug_barrier()  # what was marked and counted before has been read
                has_nan = mark_scores(row_ptr, length, pivot, words, BLOCK)
                tl.debug_barrier()
                total = rank_words(words, ties, prefix, num_words, 0, False, CHUNK)
                rank = tl.where(total <= K, tl.minimum(2 * rank, SAMPLE), tl.maximum(rank // 2, 1))
                tries += 1
            tl.debug_barrier()
            is_found = (total > K) & (total <= CAP)
            if is_found:
                gather_marked(row_ptr, total, words, prefix, num_words, top, found_ids, found_keys)
                tl.debug_barrier()
                place = hidden_zero(total) + tl.arange(0, CAP)
                keys = tl.load(found_keys + place, mask=place < total, other=BELOW)
                low = bisect(keys, K, 0, pivot, total)
                num_above, num_at, least, greatest = around(keys, low)
                mark_best(found_keys, total, low, words, ties, False, BLOCK)
                num_words = tl.cdiv(total, WORD)
            else:
                low = bisect_row(row_ptr, length, K, pivot, BLOCK)
                num_above, num_at, least, greatest = around_in_row(row_ptr, length, low, BLOCK)
                mark_best(row_ptr, length, low, words, ties, True, BLOCK)
            need = K - num_above
            tl.debug_barrier()
            rank_words(words, ties, prefix, num_words, need, True, CHUNK)
            tl.debug_barrier()
            for start in range(0, K, CHUNK):
                place = start + hidden_zero(need) + tl.arange(0, CHUNK)
                at = locate(tl.minimum(place, K - 1), words, prefix, num_words, top)
                at = tl.where(is_found, tl.load(found_ids + at, mask=is_found, other=0), at)
                put(place, at, place < K, out_ptr, slot_ptr, page_ptr, num_pages, PAGE)
            last = tl.where(need > 0, low, least)
            cut = tl.where(num_at > need, low, greatest)
            margin = tl.where(last == cut, 0.0, score_of(last) - score_of(cut))
        tl.store(kept_ptr + row, tl.minimum(length, K))
        tl.store(nan_ptr + row, has_nan)
        if margin_ptr is not None:
            tl.store(margin_ptr + row, margin)
