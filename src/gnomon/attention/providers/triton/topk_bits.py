"""Keys and marks of the exact top-k: fp32 as ordered integers, sets of columns as bits in words.

Scores are compared as int32 keys with the floats' order: −0 is 0, NaN is −inf, and BELOW lies under
     all of them.
A set of columns is one bit a column in words of 32; `prefix` counts the bits before each word. The
     j-th column of a set is then found by bisecting `prefix` and the word, for many j at once, so
     that sets are written out in order and side by side, however they were marked.
Words, ties and prefixes lie in global memory that one program owns; the caller puts barriers
     between writing and reading. Not here: which columns are marked (topk_tiles.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.language import INTERPRETED

BELOW = tl.constexpr(-(2**31))  # no score has this key
LOWEST = tl.constexpr(-2139095041)  # the key of −inf
HIGHEST = tl.constexpr(2139095040)  # the key of +inf
WORD = tl.constexpr(32)


@triton.jit
def hidden_zero(x):
    """0, of which the compiler knows nothing (x: any int32 number).

    Added to a block of numbers it keeps the block from being moved out of the loop over rows: a
    kernel of many phases would else hold the numbers of all of them in registers at all times.
    """
    if INTERPRETED:
        return x * 0
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 0;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )


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
def half_counts(word):
    """Bits set in each 2, 4, 8 and 16 bits of uint32 words."""
    pairs = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    halves = (octets + (octets >> 8)) & 0x00FF00FF
    return pairs, nibbles, octets, halves


@triton.jit
def num_bits(word):
    """Bits set in uint32 words, int32."""
    _, _, _, halves = half_counts(word)
    return ((halves + (halves >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def nth_bit(word, n):
    """Place of the n-th bit (from 0, lowest first) that is set in uint32 words; int32."""
    pairs, nibbles, octets, halves = half_counts(word)
    n = n.to(tl.uint32)
    number = halves & 0xFF
    place = tl.where(n >= number, 16, 0).to(tl.uint32)
    n = tl.where(n >= number, n - number, n)
    number = (octets >> place) & 0xFF
    place = tl.where(n >= number, place + 8, place)
    n = tl.where(n >= number, n - number, n)
    number = (nibbles >> place) & 0xF
    place = tl.where(n >= number, place + 4, place)
    n = tl.where(n >= number, n - number, n)
    number = (pairs >> place) & 0x3
    place = tl.where(n >= number, place + 2, place)
    n = tl.where(n >= number, n - number, n)
    number = (word >> place) & 0x1
    place = tl.where(n >= number, place + 1, place)
    return place.to(tl.int32)


@triton.jit
def lowest_bits(word, n):
    """The n lowest bits that are set in uint32 words, 0 <= n <= num_bits(word)."""
    last = nth_bit(word, tl.maximum(n - 1, 0)).to(tl.uint32)
    two = tl.full(word.shape, 2, tl.uint32)
    kept = word & ((two << last) - 1)  # 2 << 31 is 0: all bits
    return tl.where(n > 0, kept, 0).to(tl.uint32)


@triton.jit
def mark_block(
    row_ptr, start, length, group, least, is_all, words_ptr, largest, IS_WHOLE: tl.constexpr
):
    """Bits of BLOCK columns from ``start`` on; returns ``largest``, renewed.

    IS_WHOLE: no column is past the row, so that loads are as wide as can be.
    """
    lane = tl.arange(0, WORD)
    bit = (tl.full([WORD], 1, tl.int32) << lane)[None, :]
    column = start + group[:, None] * WORD + lane[None, :]
    at = start // WORD + group
    if IS_WHOLE:
        x = tl.load(row_ptr + column)
        passes = (x >= least) | is_all
        tl.store(words_ptr + at, tl.sum(tl.where(passes, bit, 0), 1))
    else:
        x = tl.load(row_ptr + column, mask=column < length, other=0.0)
        passes = ((x >= least) | is_all) & (column < length)
        word = tl.sum(tl.where(passes, bit, 0), 1)
        tl.store(words_ptr + at, word, mask=at * WORD < length)
    return tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def mark_scores(row_ptr, length, pivot, words_ptr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Bits of the columns whose key reaches ``pivot``; returns whether a score is NaN.

    Scores are compared as they are: NaN, which is −inf, then passes where every column does, alone.
    """
    group = hidden_zero(length) + tl.arange(0, BLOCK // WORD)
    least, is_all = score_of(pivot), pivot <= LOWEST
    largest = tl.full([BLOCK // WORD, WORD], float("-inf"), tl.float32)
    whole = length // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        largest = mark_block(row_ptr, start, length, group, least, is_all, words_ptr, largest, True)
    if whole < length:
        largest = mark_block(
            row_ptr, whole, length, group, least, is_all, words_ptr, largest, False
        )
    return tl.max(tl.max((largest != largest).to(tl.int32), 1), 0) > 0


@triton.jit
def mark_keys(keys, group, low, words_ptr, ties_ptr):
    """Bits of the keys [words, WORD] above ``low`` and, in ties, of those equal to it."""
    bit = (tl.full([WORD], 1, tl.int32) << tl.arange(0, WORD))[None, :]
    tl.store(words_ptr + group, tl.sum(tl.where(keys > low, bit, 0), 1))
    tl.store(ties_ptr + group, tl.sum(tl.where(keys == low, bit, 0), 1))


@triton.jit
def rank_words(
    words_ptr, ties_ptr, prefix_ptr, num_words, need, HAS_TIES: tl.constexpr, CHUNK: tl.constexpr
):
    """Fill ``prefix``; returns how many bits are set. HAS_TIES: ``need`` ties join them first."""
    total, seen = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    place = hidden_zero(num_words) + tl.arange(0, CHUNK)
    for start in range(0, num_words, CHUNK):
        at = start + place
        word = tl.load(words_ptr + at, mask=at < num_words, other=0).to(tl.uint32, bitcast=True)
        if HAS_TIES:
            tie = tl.load(ties_ptr + at, mask=at < num_words, other=0).to(tl.uint32, bitcast=True)
            number = num_bits(tie)
            before = seen + tl.cumsum(number, 0) - number
            word |= lowest_bits(tie, tl.minimum(tl.maximum(need - before, 0), number))
            tl.store(words_ptr + at, word.to(tl.int32, bitcast=True), mask=at < num_words)
            seen += tl.sum(number, 0)
        number = num_bits(word)
        first = total + tl.cumsum(number, 0) - number
        tl.store(prefix_ptr + at, first, mask=at < num_words)
        total += tl.sum(number, 0)
    return total


@triton.jit
def locate(j, words_ptr, prefix_ptr, num_words, top):
    """Columns of the j-th bits (int32 block, each below the number of bits that are set).

    top: a power of two, at least half of num_words.
    """
    group = tl.zeros_like(j)
    step = top
    while step > 0:
        after = group + step
        first = tl.load(prefix_ptr + after, mask=after < num_words, other=0x7FFFFFFF)
        group = tl.where(first <= j, after, group)
        step = step >> 1
    word = tl.load(words_ptr + group).to(tl.uint32, bitcast=True)
    return group * WORD + nth_bit(word, j - tl.load(prefix_ptr + group))
