"""Device code of sparse MLA: rows over their own lists of slots, and the sum of their splits.

In:  queries in two parts (latent, rope; any strides), the bytes or numbers of a pool, lists of
     slots with their counts. Out: results, or parts of them (fp32, or fp16 of packed latents) with
     their log2-sum-exp2 in fp32.
`attend_lists`: program (row and block of heads, split); it loops over its part of the row's list,
     a block of keys a turn, softmax online in base 2, and stops at the row's own count.
`combine_splits`: program (row, head); splits are added in their order, so the sum's bits hang on
     nothing but the parts; a split that holds no key is never read.
Which keys a split holds follows from the row's count alone (`keys_per_split`).
Half queries meet packed latents in fp16 (attention_entries.py says where that is exact); a bf16
     query's cast is exact for magnitudes of 2^-17 .. 65504.
PARTS: blocks of columns that plain latents are read in, with a dot each. A block of 64 keys and 128
     columns lies so over the threads that each holds the addresses of 8 keys; of 512 columns, 32.
     Sums of weights then wait for the end, when registers are free for them.
IS_EARLY (sm_90 and newer): the combine may be launched before the splits have ended, and waits for
     them on the device.
Not here: loads (attention_entries.py), tiles and splits (attention_tiles.py), launches
     (attention_sparse.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.attention_entries import (
    appended,
    converted,
    latent_parts,
    load_query,
    load_rope,
    query_parts,
    reloaded,
    zero_parts,
)
from gnomon.attention.providers.triton.language import dot, dot_into, round_to

LN_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-1.0e30)  # where a running maximum starts: finite, below any logit


@triton.jit
def keys_per_split(num_keys, num_splits, BN: tl.constexpr, SPLIT_KEYS: tl.constexpr):
    """Keys that each split of a row holds: SPLIT_KEYS, or an even share in blocks of BN if 0."""
    if SPLIT_KEYS > 0:
        return SPLIT_KEYS
    else:
        return tl.cdiv(tl.cdiv(num_keys, BN), num_splits) * BN


@triton.jit(do_not_specialize=["num_splits"])
def attend_lists(
    q, q_rope, entries, slots, count, out, lse,
    scale, page_stride, num_splits,
    q_row, q_head, q_column, rope_row, rope_head, rope_column, slots_row, slots_column,
    H: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr, DCP: tl.constexpr, DRP: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, NATIVE: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr, SPLIT_KEYS: tl.constexpr, READS_AHEAD: tl.constexpr,
    IS_EARLY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attend a split of a row's list with BH heads; ``scale`` is in base 2 (times log2 e).

    Whole lists: out [R, H, DC] in its dtype, lse natural. Splits: out [S, R, H, DC] in its dtype
    and lse [S, R, H] in base 2; a split without keys writes nothing.
    """
    ROPE_DTYPE: tl.constexpr = q.dtype.element_ty
    IS_HALF_PACKED: tl.constexpr = GROUPS > 0 and tl.float32 != ROPE_DTYPE
    DTYPE: tl.constexpr = tl.float16 if IS_HALF_PACKED else ROPE_DTYPE
    HEAD_BLOCKS: tl.constexpr = (H + BH - 1) // BH
    program = tl.program_id(0)
    split = tl.program_id(1)
    row = (program // HEAD_BLOCKS).to(tl.int64)
    head = (program % HEAD_BLOCKS) * BH + tl.arange(0, BH)
    end = tl.load(count + row)
    begin = 0
    if IS_SPLIT:
        share = keys_per_split(end, num_splits, BN, SPLIT_KEYS)
        begin = split * share
        if begin >= end:
            return
        end = tl.minimum(begin + share, end)
    target = row
    if IS_SPLIT:
        target = row + split.to(tl.int64) * (tl.num_programs(0) // HEAD_BLOCKS)
    C: tl.constexpr = DCP // PARTS
    query = query_parts(
        q, row, head, q_row, q_head, q_column, DC, DCP, H, DTYPE, PARTS
    )  # fmt: skip
    acc = zero_parts(BH, C, PARTS)
    if IS_HALF_PACKED and BH >= 64:
        # WGMMA takes a loaded block from shared memory, but one that was computed from registers,
        # and there are none left: pass the cast through the memory that the result will have.
        first = program % HEAD_BLOCKS * BH
        own = (out + (target * H + first) * DC).to(tl.pointer_type(tl.float16))
        query = (reloaded(own, query[0], head - first, H - first, DC, DCP),)
    if DR > 0:
        turned = load_query(q_rope, row, head, rope_row, rope_head, rope_column, 0, DR, DRP, H)
        turned = converted(turned, ROPE_DTYPE)
    listed = slots + row * slots_row
    # A place past the end reads the list's first key and weighs it by 0: entries that the row does
    # not list may hold NaN, which no weight removes.
    spare = tl.load(listed, mask=end > 0, other=0)
    largest = tl.full([BH], LEAST, tl.float32)
    total = tl.zeros([BH, BN] if PARTS > 1 else [BH], tl.float32)
    if READS_AHEAD:
        place = begin + tl.arange(0, BN)
        upcoming = tl.load(listed + place * slots_column, mask=place < end, other=spare)
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        place = start + tl.arange(0, BN)
        is_key = place < end
        if READS_AHEAD:
            slot = upcoming
            place += BN
            upcoming = tl.load(listed + place * slots_column, mask=place < end, other=spare)
            slot = slot.to(tl.int64)
        else:
            slot = tl.load(listed + place * slots_column, mask=is_key, other=spare).to(tl.int64)
        latents = latent_parts(
            entries, slot, page_stride, DC, DCP, GROUPS, WIDTH, PAGE, NATIVE, DTYPE, PARTS
        )
        logits = dot(query[0], tl.trans(latents[0]))
        for part in tl.static_range(1, PARTS):
            logits = dot_into(query[part], tl.trans(latents[part]), logits)
        if DR > 0:
            rope = load_rope(
                entries, slot, page_stride, DC, DR, DRP, GROUPS, WIDTH, PAGE, ROPE_DTYPE
            )
            logits = dot_into(turned, tl.trans(rope), logits)
        logits = tl.where(is_key[None, :], logits, float("-inf"))
        raised = tl.maximum(largest, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - raised[:, None])
        fade = tl.exp2(largest - raised)
        if PARTS > 1:
            total = total * fade[:, None] + weights
        else:
            total = total * fade + tl.sum(weights, 1)
        weights = round_to(weights, DTYPE)
        faded = ()
        for part in tl.static_range(PARTS):
            added = dot_into(weights, latents[part], acc[part] * fade[:, None])
            faded = appended(faded, added)
        acc = faded
        largest = raised
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if PARTS > 1:
        total = tl.sum(total, 1)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    inverse = (1.0 / total)[:, None]
    level = tl.where(is_empty, float("-inf"), largest + tl.log2(total))
    if not IS_SPLIT:
        level = level * LN_2
    for part in tl.static_range(PARTS):
        column = part * C + tl.arange(0, C)
        mask = (head < H)[:, None]
        if DC != DCP:
            mask = mask & (column < DC)[None, :]
        to = out + target * (H * DC) + head[:, None] * DC + column[None, :]
        tl.store(to, round_to(acc[part] * inverse, out.dtype.element_ty), mask=mask)
    tl.store(lse + target * H + head, level, mask=head < H)


@triton.jit(do_not_specialize=["num_rows"])
def combine_splits(
    parts, levels, count, out, lse, num_rows,
    H: tl.constexpr, DC: tl.constexpr, DCP: tl.constexpr, BN: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Out [R, H, DC] and natural lse [R, H] of parts [S, R, H, DC] with base-2 levels [S, R, H]."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    num_keys = tl.load(count + program // H)
    share = keys_per_split(num_keys, NUM_SPLITS, BN, SPLIT_KEYS)
    column = tl.arange(0, DCP)
    step = num_rows.to(tl.int64) * H
    largest = LEAST
    for split in tl.static_range(NUM_SPLITS):
        is_used = split * share < num_keys
        level = tl.load(levels + split * step + program, mask=is_used, other=float("-inf"))
        largest = tl.maximum(largest, level)
    total = 0.0
    acc = tl.zeros([DCP], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        is_used = split * share < num_keys
        level = tl.load(levels + split * step + program, mask=is_used, other=float("-inf"))
        weight = tl.exp2(level - largest)
        total += weight
        part = parts + (split * step + program) * DC + column
        value = tl.load(part, mask=is_used & (column < DC), other=0.0)
        acc += weight * value.to(tl.float32)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    acc = acc * (1.0 / total)
    level = tl.where(is_empty, float("-inf"), (largest + tl.log2(total)) * LN_2)
    to = out + program * DC + column
    tl.store(to, round_to(acc, out.dtype.element_ty), mask=column < DC)
    tl.store(lse + program, level)
