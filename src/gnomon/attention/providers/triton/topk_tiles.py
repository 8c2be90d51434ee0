"""Device kernel of the exact top-k: guess a threshold, collect what passes it, settle the rest.

In:  fp32 scores, a count per row. Out: ids ascending by column, −1 behind, flags, margin, slots.
Scores are compared as int32 keys with the floats' order: −0 is 0, NaN is −inf, and INT_MIN lies
     below all of them. A row that sees at most K columns takes all of them.
Guess: a sample of the row, SAMPLE columns in groups of 4 spread evenly, is bisected for the key
     that about sqrt(K · CAP) columns of the row should pass. One pass over the row then collects
     all columns that do pass, in order, and counts them.
Exact: if more than K and at most CAP passed, the answer lies among them: their keys are bisected
     until exactly K are at or above a key, or a tie is left, of which the lower columns are taken.
     Otherwise another guess is made, at most TRIES in all, and then the whole row is bisected, a
     pass per bit: slow, but no distribution of scores can make it wrong.
Not here: sizes, outputs, launches (topk.py). The rule for ties and NaN: design.md §5.
"""

from __future__ import annotations

import triton
import triton.language as tl

BELOW = tl.constexpr(-(2**31))  # no score has this key
LOWEST = tl.constexpr(-2139095041)  # the key of −inf
HIGHEST = tl.constexpr(2139095040)  # the key of +inf
GROUP = tl.constexpr(4)
TRIES = tl.constexpr(3)


@triton.jit
def sort_key(x):
    """int32 with the order of the fp32 numbers x."""
    x = tl.where(x == 0.0, 0.0, x)
    x = tl.where(x != x, float("-inf"), x)
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """The fp32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_keys(row_ptr, start, length, BLOCK: tl.constexpr):
    """(keys, columns, scores) of columns start .. start + BLOCK − 1; BELOW past the row."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < length, other=float("-inf"))
    return tl.where(column < length, sort_key(x), BELOW), column, x


@triton.jit
def middle(low, high):
    """(low + high) // 2 without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


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
    place = tl.arange(0, SAMPLE)
    group = (place // GROUP).to(tl.int64) * length // (SAMPLE // GROUP)
    x = tl.load(row_ptr + group + place % GROUP)
    return bisect(sort_key(x), rank, rank // 8, LOWEST, SAMPLE)


@triton.jit
def collect(row_ptr, length, pivot, keys_ptr, ids_ptr, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """(columns that reach the pivot, NaN seen); the first CAP of them are written, in order."""
    total = tl.zeros([], tl.int32)
    num_nan = tl.zeros([], tl.int32)
    for start in range(0, length, BLOCK):
        keys, column, x = load_keys(row_ptr, start, length, BLOCK)
        passes = keys >= pivot
        place = total + tl.cumsum(passes.to(tl.int32), 0) - 1
        is_kept = passes & (place < CAP)
        tl.store(keys_ptr + place, keys, mask=is_kept)
        tl.store(ids_ptr + place, column, mask=is_kept)
        both = tl.sum(passes.to(tl.int32) + ((x != x).to(tl.int32) << 16), 0)
        total += both & 0xFFFF
        num_nan += both >> 16
    return total, num_nan


@triton.jit
def count_row(row_ptr, length, pivot, BLOCK: tl.constexpr):
    """Columns of the row that reach the pivot."""
    total = tl.zeros([], tl.int32)
    for start in range(0, length, BLOCK):
        keys, _, _ = load_keys(row_ptr, start, length, BLOCK)
        total += tl.sum((keys >= pivot).to(tl.int32), 0)
    return total


@triton.jit
def bisect_row(row_ptr, length, wanted, guess, BLOCK: tl.constexpr):
    """The greatest key that ``wanted`` columns of the row reach, or one that just so many reach."""
    low, at_low, high = tl.full([], LOWEST, tl.int32), length, tl.full([], HIGHEST + 1, tl.int32)
    pivot = guess + 1  # a tie at the guess is then found in one pass
    while (low + 1 < high) & (at_low > wanted):
        reached = count_row(row_ptr, length, pivot, BLOCK)
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
def put_best(
    keys, ids, low, need, state, ids_ptr, slots_ptr, pages_ptr, num_pages, PAGE: tl.constexpr
):
    """Append the columns above ``low`` and, of those at it, the first ``need`` of the row.

    state: (above so far, at low so far, least key above, greatest key below); returned renewed.
    """
    num_above, num_at, least, greatest = state
    is_above, is_at = keys > low, keys == low
    packed = is_above.to(tl.int32) + (is_at.to(tl.int32) << 16)
    running = tl.cumsum(packed, 0)
    at = num_at + (running >> 16)
    place = num_above + (running & 0xFFFF) + tl.minimum(at, need) - 1
    is_taken = is_above | (is_at & (at <= need))
    put(place, ids, is_taken, ids_ptr, slots_ptr, pages_ptr, num_pages, PAGE)
    both = tl.sum(packed, 0)
    least = tl.minimum(least, tl.min(tl.where(is_above, keys, HIGHEST), 0))
    greatest = tl.maximum(greatest, tl.max(tl.where(keys < low, keys, BELOW), 0))
    return num_above + (both & 0xFFFF), num_at + (both >> 16), least, greatest


@triton.jit
def put_all(
    row_ptr,
    length,
    ids_ptr,
    slots_ptr,
    pages_ptr,
    num_pages,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """The list of a row that sees at most K columns; returns how many are NaN, if LOOKS."""
    num_nan = tl.zeros([], tl.int32)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        ids = tl.where(column < length, column, -1)
        put(column, ids, column < K, ids_ptr, slots_ptr, pages_ptr, num_pages, PAGE)
        if LOOKS:
            x = tl.load(row_ptr + column, mask=column < length, other=0.0)
            num_nan += tl.sum((x != x).to(tl.int32), 0)
    return num_nan


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
    K: tl.constexpr,
    CAP: tl.constexpr,
    SAMPLE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """Rows p, p + programs, …; scratch: 2 · CAP int32 a program. TARGET: columns to pass a guess.

    LOOKS: rows that see at most K columns are searched for NaN, else their scores are not read.
    slots_ptr, margin_ptr: None where they are not wanted; request_ptr None: row m has pages[m].
    """
    found_ptr = scratch_ptr + tl.program_id(0).to(tl.int64) * (2 * CAP)
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
            num_nan = put_all(
                row_ptr, length, out_ptr, slot_ptr, page_ptr, num_pages, K, 1024, PAGE, LOOKS
            )
        else:
            rank = tl.maximum((TARGET * SAMPLE / length.to(tl.float32)).to(tl.int32), 1)
            pivot = tl.full([], LOWEST, tl.int32)
            total = tl.full([], CAP + 1, tl.int32)
            num_nan = tl.zeros([], tl.int32)
            tries = tl.zeros([], tl.int32)
            while (tries < TRIES) & ((total <= K) | (total > CAP)):
                if length > CAP:
                    pivot = sampled_pivot(row_ptr, length, rank, SAMPLE)
                tl.debug_barrier()  # what an earlier pass wrote to the scratch has been read
                total, num_nan = collect(
                    row_ptr, length, pivot, found_ptr, found_ptr + CAP, CAP, BLOCK
                )
                rank = tl.where(total <= K, tl.minimum(2 * rank, SAMPLE), tl.maximum(rank // 2, 1))
                tries += 1
            tl.debug_barrier()  # what this pass wrote is there
            state = (
                tl.zeros([], tl.int32),
                tl.zeros([], tl.int32),
                tl.full([], HIGHEST, tl.int32),
                tl.full([], BELOW, tl.int32),
            )
            if (total > K) & (total <= CAP):
                place = tl.arange(0, CAP)
                keys = tl.load(found_ptr + place, mask=place < total, other=BELOW)
                low = bisect(keys, K, 0, pivot, total)
                need = K - tl.sum((keys > low).to(tl.int32), 0)
                ids = tl.load(found_ptr + CAP + place, mask=place < total, other=0)
                state = put_best(
                    keys, ids, low, need, state, out_ptr, slot_ptr, page_ptr, num_pages, PAGE
                )
            else:
                low = bisect_row(row_ptr, length, K, pivot, BLOCK)
                need = K - count_row(row_ptr, length, low + 1, BLOCK)
                for start in range(0, length, BLOCK):
                    keys, column, _ = load_keys(row_ptr, start, length, BLOCK)
                    state = put_best(
                        keys,
                        column,
                        low,
                        need,
                        state,
                        out_ptr,
                        slot_ptr,
                        page_ptr,
                        num_pages,
                        PAGE,
                    )
            last = tl.where(need > 0, low, state[2])
            cut = tl.where(state[1] > need, low, state[3])
            margin = tl.where(last == cut, 0.0, score_of(last) - score_of(cut))
        tl.store(kept_ptr + row, tl.minimum(length, K))
        tl.store(nan_ptr + row, (num_nan > 0).to(tl.int8))
        if margin_ptr is not None:
            tl.store(margin_ptr + row, margin)
