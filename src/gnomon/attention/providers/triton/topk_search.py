"""Searches of the exact top-k: a key that a wanted number of keys reach, in registers or in a row.

In:  blocks of keys (topk_bits.py), or a row of fp32 scores. Out: keys, and what lies around them.
Counts of keys that reach a pivot fall as the pivot rises, so that a range of keys with enough on
its low end and too few on its high end closes on the answer, whatever the scores are.
Not here: what is done with the answer (topk_tiles.py).
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
    sort_key,
)

LONGEST = tl.constexpr(16)


@triton.jit
def load_keys(row_ptr, start, length, BLOCK: tl.constexpr):
    """Keys [BLOCK / WORD, WORD] of columns from ``start`` on, BELOW past the row; and NaN seen."""
    group, lane = hidden_zero(length) + tl.arange(0, BLOCK // WORD), tl.arange(0, WORD)
    column = start + group[:, None] * WORD + lane[None, :]
    x = tl.load(row_ptr + column, mask=column < length, other=0.0)
    return tl.where(column < length, sort_key(x), BELOW), x != x


@triton.jit
def between(low, high, share):
    """A key in low + 1 .. high − 1, about ``share`` of the way; high − low may pass 2^31."""
    gap = (high - low).to(tl.uint32, bitcast=True)
    step = (gap.to(tl.float32) * share).to(tl.uint32)
    step = tl.minimum(tl.maximum(step, 1), gap - 1)
    return low + step.to(tl.int32, bitcast=True)


@triton.jit
def search(keys, wanted, slack, low, at_low):
    """A key that wanted .. wanted + slack of ``keys`` reach, or the greatest that wanted reach.

    Returns it and how many reach it. ``at_low`` keys, at least ``wanted``, reach ``low``.
    Pivots are interpolated between counts (the Illinois rule: an end that stays counts half), which
    takes half as many as bisection where scores are smooth; after LONGEST the rest is bisected.
    """
    high, at_high = tl.max(keys) + 1, tl.zeros([], tl.int32)
    low_weight, high_weight = tl.full([], 1.0, tl.float32), tl.full([], 1.0, tl.float32)
    moved, turn = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    aim = wanted + slack // 2
    while (low + 1 < high) & (at_low > wanted + slack):
        over = (at_low - aim).to(tl.float32) * low_weight
        under = tl.maximum(aim - at_high, 1).to(tl.float32) * high_weight
        share = tl.where(turn < LONGEST, over / (over + under), 0.5)
        pivot = between(low, high, share)
        reached = tl.sum((keys >= pivot).to(tl.int32))
        is_low = reached >= wanted
        again = tl.where(is_low, moved == 1, moved == 2)
        low_weight = tl.where(is_low, 1.0, tl.where(again, low_weight * 0.5, 1.0))
        high_weight = tl.where(is_low, tl.where(again, high_weight * 0.5, 1.0), 1.0)
        moved = tl.where(is_low, 1, 2)
        low, at_low = tl.where(is_low, pivot, low), tl.where(is_low, reached, at_low)
        high, at_high = tl.where(is_low, high, pivot), tl.where(is_low, at_high, reached)
        turn += 1
    return low, at_low


@triton.jit
def sampled_pivot(row_ptr, length, rank, SAMPLE: tl.constexpr, GROUP: tl.constexpr):
    """A key that about ``rank`` of SAMPLE columns of the row reach, and how many do.

    GROUP: so many columns side by side; neighbours are alike, and groups say more than their sizes.
    """
    place = hidden_zero(length) + tl.arange(0, SAMPLE)
    group = (place // GROUP).to(tl.int64) * length // (SAMPLE // GROUP)
    keys = sort_key(tl.load(row_ptr + group + place % GROUP))
    return search(keys, rank, rank // 8, tl.min(keys), tl.full([], SAMPLE, tl.int32))


@triton.jit
def around(keys, low, HAS_MARGIN: tl.constexpr):
    """(keys above ``low``, keys at it, the least above, the greatest below) of <= 32,767 keys.

    Without HAS_MARGIN the last three say nothing.
    """
    if HAS_MARGIN:
        both = tl.sum((keys > low).to(tl.int32) + ((keys == low).to(tl.int32) << 16))
        least = tl.min(tl.where(keys > low, keys, HIGHEST))
        greatest = tl.max(tl.where(keys < low, keys, BELOW))
        return both & 0xFFFF, both >> 16, least, greatest
    else:
        return tl.sum((keys > low).to(tl.int32)), 0, HIGHEST, BELOW


@triton.jit
def mark_row(
    row_ptr, length, low, words_ptr, ties_ptr, BLOCK: tl.constexpr, HAS_MARGIN: tl.constexpr
):
    """``mark_keys`` and ``around`` of all columns of the row; and whether a score is NaN."""
    num_above, num_at = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    num_nan = tl.zeros([], tl.int32)
    least, greatest = tl.full([], HIGHEST, tl.int32), tl.full([], BELOW, tl.int32)
    for start in range(0, length, BLOCK):
        keys, is_nan = load_keys(row_ptr, start, length, BLOCK)
        num_nan += tl.max(is_nan.to(tl.int32))
        group = start // WORD + tl.arange(0, BLOCK // WORD)
        bit = (tl.full([WORD], 1, tl.int32) << tl.arange(0, WORD))[None, :]
        is_word = group * WORD < length
        tl.store(words_ptr + group, tl.sum(tl.where(keys > low, bit, 0), 1), mask=is_word)
        tl.store(ties_ptr + group, tl.sum(tl.where(keys == low, bit, 0), 1), mask=is_word)
        above, at, lower, upper = around(keys, low, HAS_MARGIN)
        num_above += above
        num_at += at
        least = tl.minimum(least, lower)
        greatest = tl.maximum(greatest, upper)
    return num_above, num_at, least, greatest, num_nan > 0


@triton.jit
def bisect_row(row_ptr, length, wanted, guess, BLOCK: tl.constexpr):
    """The greatest key that ``wanted`` columns of the row reach, or one that just so many reach."""
    low, at_low, high = tl.full([], LOWEST, tl.int32), length, tl.full([], HIGHEST + 1, tl.int32)
    pivot = guess + 1  # a tie at the guess is then found in one pass
    while (low + 1 < high) & (at_low > wanted):
        reached = tl.zeros([], tl.int32)
        for start in range(0, length, BLOCK):
            keys, _ = load_keys(row_ptr, start, length, BLOCK)
            reached += tl.sum((keys >= pivot).to(tl.int32))
        is_low = reached >= wanted
        low = tl.where(is_low, pivot, low)
        high = tl.where(is_low, high, pivot)
        at_low = tl.where(is_low, reached, at_low)
        is_guess = (high == guess + 1) & (low < guess)
        pivot = tl.where(is_guess, guess, between(low, tl.maximum(high, low + 2), 0.5))
    return low
