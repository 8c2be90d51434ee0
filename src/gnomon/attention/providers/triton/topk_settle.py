"""Device kernel of the exact top-k of few rows: a program a row settles what its parts have kept.

In:  fp32 scores, a count per row, scratch rows that topk_parts.py has filled. Out: as topk_tiles.py
     says.
Kept: if more than K and at most CAP columns were kept, the answer lies among them.
Tied: if fewer than K lie above the parts' key and too many at it, that key is the K-th, and ties
     are taken from its bits.
Else the sample has misled, and the whole row is bisected, by one program: slow, but exact.
A row of at most CAP columns is held whole, without parts. Not here: sizes, launches (topk.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.topk_bits import (
    BELOW,
    HIGHEST,
    LOWEST,
    WORD,
    locate,
    mark_keys,
    rank_words,
    score_of,
)
from gnomon.attention.providers.triton.topk_parts import FOUR, part_of, places_of
from gnomon.attention.providers.triton.topk_search import (
    around,
    bisect_row,
    load_keys,
    mark_row,
    search,
)
from gnomon.attention.providers.triton.topk_tiles import put, put_all

STRIDE = tl.constexpr(16)  # parts are looked up among so many, then among those between


@triton.jit
def count_parts(meta, num_active, PARTS: tl.constexpr):
    """(kept, with padding, above the pivot, whether NaN, pivot); says where each part begins."""
    part = tl.arange(0, PARTS)
    is_part = part < num_active
    number = tl.load(meta + part, mask=is_part, other=0)
    above = tl.load(meta + PARTS + part, mask=is_part, other=0)
    num_nan = tl.load(meta + 2 * PARTS + part, mask=is_part, other=0)
    whole = tl.cdiv(number, FOUR) * FOUR
    begin = tl.where(is_part, tl.cumsum(whole, 0) - whole, 0x7FFFFFFF)
    tl.store(meta + 4 * PARTS + part, begin)
    pivot = tl.load(meta + 3 * PARTS)
    return tl.sum(number, 0), tl.sum(whole, 0), tl.sum(above, 0), tl.max(num_nan, 0) > 0, pivot


@triton.jit
def kept_columns(meta, kept, held, region, num_parts, CAP: tl.constexpr, PARTS: tl.constexpr):
    """Keys and ids [CAP / 4, 4] of ``held`` columns kept by all parts, in order; BELOW behind."""
    start = tl.arange(0, CAP // FOUR) * FOUR
    begins = meta + 4 * PARTS
    # Two rounds of loads side by side: bisecting would wait for seven, one after the other.
    part = tl.zeros_like(start)
    for place in tl.static_range(PARTS // STRIDE, PARTS, PARTS // STRIDE):
        part += tl.where(tl.load(begins + place) <= start, PARTS // STRIDE, 0)
    block = part
    for place in tl.static_range(1, PARTS // STRIDE):
        part += tl.where(tl.load(begins + block + place) <= start, 1, 0)
    start -= tl.load(begins + part)
    start = tl.multiple_of(part * region + start, 4)
    at = start[:, None] + tl.arange(0, FOUR)[None, :]
    is_held = (tl.arange(0, CAP // FOUR) * FOUR < held)[:, None]
    keys = tl.load(kept + at, mask=is_held, other=BELOW)
    ids = tl.load(kept + tl.cast(num_parts, tl.int64) * region + at, mask=is_held, other=0)
    return keys, ids


@triton.jit(
    do_not_specialize=[
        "num_columns",
        "num_pages",
        "pages_row",
        "num_parts",
        "scratch_row",
        "most_words",
        "region",
        "top",
    ],
    do_not_specialize_on_alignment=[
        "count_ptr",
        "kept_ptr",
        "margin_ptr",
        "nan_ptr",
        "pages_ptr",
        "request_ptr",
    ],
)
def topk_settle_kernel(
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
    num_columns,
    num_pages,
    scores_row,
    ids_row,
    slots_row,
    pages_row,
    num_parts,
    scratch_row,
    most_words,
    region,
    top,
    K: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    LOOKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Program m: row m, of num_parts parts of blocks of PART_BLOCK columns; else as topk_kernel."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
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
        meta, words, ties, prefix, found_ids, kept = places_of(
            scratch_ptr, row, scratch_row, most_words, CAP, PARTS
        )
        is_short = length <= CAP
        total, held, above = length, length, tl.zeros([], tl.int32)
        pivot, has_nan = tl.full([], LOWEST, tl.int32), tl.zeros([], tl.int1)
        if not is_short:
            num_active = tl.cdiv(length, part_of(length, num_parts, PART_BLOCK))
            total, held, above, has_nan, pivot = count_parts(meta, num_active, PARTS)
            tl.debug_barrier()
        is_found = (total > K) & (held <= CAP)
        group, num_words = tl.arange(0, CAP // WORD), tl.cdiv(length, WORD)
        least, greatest = tl.full([], HIGHEST, tl.int32), tl.full([], BELOW, tl.int32)
        if is_found:
            if is_short:
                keys, is_nan = load_keys(row_ptr, 0, length, CAP)
                has_nan = tl.max(is_nan.to(tl.int32)) > 0
                pivot = tl.min(tl.where(keys == BELOW, HIGHEST, keys))
            else:
                keys, ids = kept_columns(meta, kept, held, region, num_parts, CAP, PARTS)
                place = tl.arange(0, CAP // FOUR)[:, None] * FOUR + tl.arange(0, FOUR)[None, :]
                tl.store(found_ids + place, ids)
                keys = tl.reshape(keys, [CAP // WORD, WORD])
            low, _ = search(keys, K, 0, pivot, total)
            num_above, num_at, least, greatest = around(keys, low, margin_ptr is not None)
            mark_keys(keys, group, low, words, ties)
            num_words = tl.cdiv(held, WORD)
        else:
            if (above < K) & (total > K):
                low, num_above, num_at = pivot, above, total - above
            else:
                low = bisect_row(row_ptr, length, K, pivot, BLOCK)
                num_above, num_at, least, greatest, _ = mark_row(
                    row_ptr, length, low, words, ties, BLOCK, margin_ptr is not None
                )
        need = K - num_above
        tl.debug_barrier()
        if is_found:
            rank_words(words, ties, prefix, num_words, need, True, CAP // WORD)
        else:
            rank_words(words, ties, prefix, num_words, need, True, CHUNK)
        tl.debug_barrier()
        is_listed = is_found & (length > CAP)
        top = tl.where(is_found, CAP // WORD // 2, top)
        for start in range(0, K, LIST):
            place = start + tl.arange(0, LIST)
            at = locate(tl.minimum(place, K - 1), words, prefix, num_words, top)
            at = tl.where(is_listed, tl.load(found_ids + at, mask=is_listed, other=0), at)
            put(place, at, place < K, out_ptr, slot_ptr, page_ptr, num_pages, PAGE)
        last = tl.where(need > 0, low, least)
        cut = tl.where(num_at > need, low, greatest)
        margin = tl.where(last == cut, 0.0, score_of(last) - score_of(cut))
    tl.store(kept_ptr + row, tl.minimum(length, K))
    tl.store(nan_ptr + row, has_nan)
    if margin_ptr is not None:
        tl.store(margin_ptr + row, margin)
