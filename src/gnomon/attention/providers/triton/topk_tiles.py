"""Device kernel of the exact top-k: guess a threshold, mark what passes it, settle the rest.

In:  fp32 scores, a count per row. Out: ids ascending by column, −1 behind, flags, margin, slots.
Short: a row of at most CAP columns is held in registers; its keys are searched until exactly K are
     at or above a key, or a tie is left, of which the lower columns are taken.
Guess: of a longer row a sample, SAMPLE columns in groups of 4 spread evenly, is searched for the
     key that about ``target`` columns of the row should pass. One pass over it then marks those
     that do: a bit a column, with no order between the warps, and the bits are counted.
Exact: if more than K and at most CAP passed, the answer lies among them, as in a short row.
     Otherwise another guess is made, at most TRIES in all, and then the whole row is bisected, a
     pass per bit: slow, but no distribution of scores can make it wrong.
A row that sees at most K columns takes all of them. Not here: sizes, outputs, launches (topk.py),
searches (topk_search.py), keys and bits (topk_bits.py). The rule for ties and NaN: design.md §5.
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
    mark_keys,
    mark_scores,
    rank_words,
    score_of,
    sort_key,
)
from gnomon.attention.providers.triton.topk_search import (
    around,
    bisect_row,
    load_keys,
    mark_row,
    sampled_pivot,
    search,
)

TRIES = tl.constexpr(3)
TIED = tl.constexpr(16)


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
    LIST: tl.constexpr,
    PAGE: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """The list of a row that sees at most K columns; returns whether one is NaN, if LOOKS."""
    num_nan = tl.zeros([], tl.int32)
    for start in range(0, K, LIST):
        column = start + hidden_zero(length) + tl.arange(0, LIST)
        ids = tl.where(column < length, column, -1)
        put(column, ids, column < K, ids_ptr, slots_ptr, pages_ptr, num_pages, PAGE)
        if LOOKS:
            x = tl.load(row_ptr + column, mask=column < length, other=0.0)
            num_nan += tl.sum((x != x).to(tl.int32), 0)
    return num_nan > 0


@triton.jit
def gather_marked(
    row_ptr, total, words_ptr, prefix_ptr, num_words, top, ids_ptr, keys_ptr, CHUNK: tl.constexpr
):
    """Columns and keys of all ``total`` marked columns of the row, in order."""
    for start in range(0, total, CHUNK):
        place = start + hidden_zero(total) + tl.arange(0, CHUNK)
        inside = place < total
        column = locate(tl.minimum(place, total - 1), words_ptr, prefix_ptr, num_words, top)
        tl.store(ids_ptr + place, column, mask=inside)
        tl.store(keys_ptr + place, sort_key(tl.load(row_ptr + column)), mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "num_columns", "num_pages", "pages_row", "scratch_row", "top"],
    do_not_specialize_on_alignment=[
        "count_ptr",
        "kept_ptr",
        "margin_ptr",
        "nan_ptr",
        "pages_ptr",
        "request_ptr",
    ],
)
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
    target,
    K: tl.constexpr,
    CAP: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """Rows p, p + programs, …; scratch_row: 2 · CAP and three times the words of a row.

    target: columns to pass a guess. top: the largest power of two below the words of a row.
    CHUNK: words counted, or columns gathered, at once; LIST: ids written at once.
    STAGES: blocks of the pass over a row that are on their way at once.
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
                row_ptr, length, out_ptr, slot_ptr, page_ptr, num_pages, K, LIST, PAGE, LOOKS
            )
        else:
            pivot = tl.full([], LOWEST, tl.int32)
            has_nan = tl.zeros([], tl.int1)
            num_words = tl.cdiv(length, WORD)
            is_short = length <= CAP
            total = length
            if not is_short:
                rank = tl.maximum((target * SAMPLE / length.to(tl.float32)).to(tl.int32), 1)
                tries = tl.zeros([], tl.int32)
                while (tries < TRIES) & ((total <= K) | (total > CAP)):
                    pivot, reached = sampled_pivot(row_ptr, length, rank, SAMPLE, 4)
                    if reached > 2 * rank + TIED:  # equal scores in numbers: no guess parts them
                        tries = TRIES
                    else:
                        tl.debug_barrier()  # what was marked and counted before has been read
                        has_nan = mark_scores(row_ptr, length, pivot, words, BLOCK, STAGES)
                        tl.debug_barrier()
                        total = rank_words(words, ties, prefix, num_words, 0, False, CHUNK)
                        doubled, halved = tl.minimum(2 * rank, SAMPLE), tl.maximum(rank // 2, 1)
                        rank = tl.where(total <= K, doubled, halved)
                        tries += 1
                if (total > K) & (total <= CAP):
                    tl.debug_barrier()
                    gather_marked(
                        row_ptr, total, words, prefix, num_words, top, found_ids, found_keys, CHUNK
                    )
            tl.debug_barrier()
            is_found = (total > K) & (total <= CAP)
            if is_found:
                group = hidden_zero(total) + tl.arange(0, CAP // WORD)
                place = group[:, None] * WORD + tl.arange(0, WORD)[None, :]
                if is_short:
                    keys, is_nan = load_keys(row_ptr, 0, length, CAP)
                    has_nan = tl.max(is_nan.to(tl.int32)) > 0
                    pivot = tl.min(tl.where(place < total, keys, HIGHEST))
                else:
                    keys = tl.load(found_keys + place, mask=place < total, other=BELOW)
                low, _ = search(keys, K, 0, pivot, total)
                num_above, num_at, least, greatest = around(keys, low, margin_ptr is not None)
                mark_keys(keys, group, low, words, ties)
                num_words = tl.cdiv(total, WORD)
            else:
                low = bisect_row(row_ptr, length, K, pivot, BLOCK)
                num_above, num_at, least, greatest, has_nan = mark_row(
                    row_ptr, length, low, words, ties, BLOCK, margin_ptr is not None
                )
            need = K - num_above
            tl.debug_barrier()
            rank_words(words, ties, prefix, num_words, need, True, CHUNK)
            tl.debug_barrier()
            is_listed = is_found & (length > CAP)
            for start in range(0, K, LIST):
                place = start + hidden_zero(need) + tl.arange(0, LIST)
                at = locate(tl.minimum(place, K - 1), words, prefix, num_words, top)
                at = tl.where(is_listed, tl.load(found_ids + at, mask=is_listed, other=0), at)
                put(place, at, place < K, out_ptr, slot_ptr, page_ptr, num_pages, PAGE)
            last = tl.where(need > 0, low, least)
            cut = tl.where(num_at > need, low, greatest)
            margin = tl.where(last == cut, 0.0, score_of(last) - score_of(cut))
            tl.debug_barrier()  # the next row writes where this one has read
        tl.store(kept_ptr + row, tl.minimum(length, K))
        tl.store(nan_ptr + row, has_nan)
        if margin_ptr is not None:
            tl.store(margin_ptr + row, margin)
