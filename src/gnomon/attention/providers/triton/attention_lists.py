"""Device code of sparse MLA: rows over their own lists of slots, and the sum of their splits.

In:  queries in two parts (latent, rope; any strides), the bytes or numbers of a pool, lists of
     slots with their counts. Out: results, or fp32 parts of them with their log2-sum-exp2.
`attend_lists`: program (row and block of heads, split); it loops over its part of the row's list,
     a block of keys a turn, softmax online in base 2, and stops at the row's own count.
`combine_splits`: program (row, head); splits are added in their order, so the sum's bits hang on
     nothing but the parts; a split that holds no key is never read.
Which keys a split holds follows from the row's count alone (`keys_per_split`).
Packed latents (fp8_ds_mla, IS_PACKED): codes times power-of-two scales. In fp16 that product is
     exact for scales of 2^-15 .. 2^7 (finer ones lose what is below 2^-25, larger ones overflow to
     infinity, which a normalised latent never reaches), and so is a bf16 query's cast for
     magnitudes of 2^-17 .. 65504. The rope part stays in its own dtype. fp32 queries read fp32.
IS_EARLY (sm_90 and newer): the combine may be launched before the splits have ended, and waits for
     them on the device.
Not here: tiles and numbers of splits (attention_tiles.py), launches (attention_sparse.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.language import INTERPRETED, dot, dot_into, round_to

LN_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-1.0e30)  # where a running maximum starts: finite, below any logit


@triton.jit
def keys_per_split(num_keys, num_splits, BN: tl.constexpr, SPLIT_KEYS: tl.constexpr):
    """Keys that each split of a row holds: SPLIT_KEYS, or an even share in blocks of BN if 0."""
    if SPLIT_KEYS > 0:
        return SPLIT_KEYS
    else:
        return tl.cdiv(tl.cdiv(num_keys, BN), num_splits) * BN


@triton.jit
def entry_offset(slot, page_stride, WIDTH: tl.constexpr, PAGE: tl.constexpr):
    """Offset of a slot's entry, in whatever unit the stride and WIDTH have; PAGE 0: no gaps."""
    if PAGE == 0:
        return slot * WIDTH
    else:
        return (slot // PAGE) * page_stride + (slot % PAGE) * WIDTH


@triton.jit
def e4m3_to_fp16(codes, NATIVE: tl.constexpr):
    """fp16 values of e4m3 codes (uint8 unless NATIVE), exactly; NaN for 0x7f and 0xff."""
    if NATIVE and not INTERPRETED:
        return codes.to(tl.float16)
    else:
        wide = codes.to(tl.uint16)
        magnitude = wide & 0x7F
        # Exponent and mantissa in fp16's places; 2^8 moves the bias from 7 to 15.
        bits = (magnitude << 7) | ((wide & 0x80) << 8)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def converted(x, dtype: tl.constexpr):
    """``x`` in ``dtype``; untouched where it is already, so that a dot can read it as it came."""
    if x.dtype == dtype:
        return x
    else:
        return round_to(x.to(tl.float32), dtype)


@triton.jit
def load_columns(base, offset, column, D: tl.constexpr, IS_WHOLE: tl.constexpr):
    """[tokens, columns] at base + offset; zeros from column D on, unless there are none."""
    at = base + offset[:, None] + column[None, :]
    if IS_WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=(column < D)[None, :], other=0)


@triton.jit
def load_latents(
    entries, slot, page_stride,
    DC: tl.constexpr, DCP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Latents [BN, DCP] of a block of slots in DTYPE; GROUPS scales a token, 0 for plain pools."""
    column = tl.arange(0, DCP)
    offset = entry_offset(slot, page_stride, WIDTH, PAGE)
    if GROUPS > 0 and NATIVE and not INTERPRETED:
        codes = entries.to(tl.pointer_type(tl.float8e4nv))
        raw = load_columns(codes, offset, column, DC, DC == DCP)
    else:
        raw = load_columns(entries, offset, column, DC, DC == DCP)
    if GROUPS == 0:
        return converted(raw, DTYPE)
    else:
        value = e4m3_to_fp16(raw, NATIVE).to(DTYPE)
        scales = entries.to(tl.pointer_type(tl.float32))
        first = entry_offset(slot, page_stride // 4, WIDTH // 4, PAGE) + DC // 4
        if GROUPS * (DC // GROUPS) == DCP:
            group = tl.arange(0, GROUPS)
            scale = tl.load(scales + first[:, None] + group[None, :])
            BN: tl.constexpr = value.shape[0]
            parted = value.reshape(BN, GROUPS, DC // GROUPS) * scale.to(DTYPE)[:, :, None]
            return parted.reshape(BN, DCP)
        else:
            group = tl.minimum(column // (DC // GROUPS), GROUPS - 1)
            scale = tl.load(scales + first[:, None] + group[None, :])
            return value * scale.to(DTYPE)


@triton.jit
def load_rope(
    entries, slot, page_stride,
    DC: tl.constexpr, DR: tl.constexpr, DRP: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rope parts [BN, DRP] of a block of slots in DTYPE."""
    column = tl.arange(0, DRP)
    if GROUPS == 0:
        offset = entry_offset(slot, page_stride, WIDTH, PAGE) + DC
        raw = load_columns(entries, offset, column, DR, DR == DRP)
    else:
        numbers = entries.to(tl.pointer_type(tl.bfloat16))
        offset = entry_offset(slot, page_stride // 2, WIDTH // 2, PAGE) + (DC // 2 + 2 * GROUPS)
        raw = load_columns(numbers, offset, column, DR, DR == DRP)
    return converted(raw, DTYPE)


@triton.jit
def load_query(q, row, head, strides_row, strides_head, stride, D: tl.constexpr, DP: tl.constexpr,
               H: tl.constexpr):  # fmt: skip
    """One row's heads [BH, DP] of q, as stored; zeros beyond H heads and D columns."""
    column = tl.arange(0, DP)
    place = q + row * strides_row + head[:, None] * strides_head + column[None, :] * stride
    mask = (head < H)[:, None]
    if D != DP:
        mask = mask & (column < D)[None, :]
    return tl.load(place, mask=mask, other=0)


@triton.jit
def reloaded(memory, x, row, num_rows, D: tl.constexpr, DP: tl.constexpr):
    """``x`` [rows, DP], stored at ``memory`` and loaded again by the same program."""
    column = tl.arange(0, DP)
    place = memory + row[:, None] * D + column[None, :]
    mask = (row < num_rows)[:, None]
    if D != DP:
        mask = mask & (column < D)[None, :]
    tl.store(place, x, mask=mask)
    tl.debug_barrier()
    return tl.load(place, mask=mask, other=0)


@triton.jit(do_not_specialize=["num_splits"])
def attend_lists(
    q, q_rope, entries, slots, count, out, lse,
    scale, page_stride, num_splits,
    q_row, q_head, q_column, rope_row, rope_head, rope_column, slots_row, slots_column,
    H: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr, DCP: tl.constexpr, DRP: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, NATIVE: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr, SPLIT_KEYS: tl.constexpr, READS_AHEAD: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Attend a split of a row's list with BH heads; ``scale`` is in base 2 (times log2 e).

    Whole lists: out [R, H, DC] in its dtype, lse natural. Splits: out [S, R, H, DC] and lse
    [S, R, H] in fp32 and base 2; a split without keys writes nothing.
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
    query = load_query(q, row, head, q_row, q_head, q_column, DC, DCP, H)
    query = converted(query, DTYPE)
    if IS_HALF_PACKED and BH >= 64:
        # WGMMA takes a loaded block from shared memory, but one that was computed from registers,
        # and there are none left: pass the cast through the memory that the result will have.
        first = program % HEAD_BLOCKS * BH
        own = (out + (target * H + first) * DC).to(tl.pointer_type(tl.float16))
        query = reloaded(own, query, head - first, H - first, DC, DCP)
    if DR > 0:
        turned = load_query(q_rope, row, head, rope_row, rope_head, rope_column, DR, DRP, H)
        turned = converted(turned, ROPE_DTYPE)
    listed = slots + row * slots_row
    # A place past the end reads the list's first key and weighs it by 0: entries that the row does
    # not list may hold NaN, which no weight removes.
    spare = tl.load(listed, mask=end > 0, other=0)
    largest = tl.full([BH], LEAST, tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, DCP], tl.float32)
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
        latents = load_latents(
            entries, slot, page_stride, DC, DCP, GROUPS, WIDTH, PAGE, NATIVE, DTYPE
        )
        logits = dot(query, tl.trans(latents))
        if DR > 0:
            rope = load_rope(
                entries, slot, page_stride, DC, DR, DRP, GROUPS, WIDTH, PAGE, ROPE_DTYPE
            )
            logits = dot_into(turned, tl.trans(rope), logits)
        logits = tl.where(is_key[None, :], logits, float("-inf"))
        raised = tl.maximum(largest, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - raised[:, None])
        fade = tl.exp2(largest - raised)
        total = total * fade + tl.sum(weights, 1)
        acc = dot_into(round_to(weights, DTYPE), latents, acc * fade[:, None])
        largest = raised
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    acc = acc * (1.0 / total)[:, None]
    level = tl.where(is_empty, float("-inf"), largest + tl.log2(total))
    if not IS_SPLIT:
        level = level * LN_2
    column = tl.arange(0, DCP)
    mask = (head < H)[:, None]
    if DC != DCP:
        mask = mask & (column < DC)[None, :]
    to = out + target * (H * DC) + head[:, None] * DC + column[None, :]
    tl.store(to, round_to(acc, out.dtype.element_ty), mask=mask)
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
        acc += weight * tl.load(part, mask=is_used & (column < DC), other=0.0)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    acc = acc * (1.0 / total)
    level = tl.where(is_empty, float("-inf"), (largest + tl.log2(total)) * LN_2)
    to = out + program * DC + column
    tl.store(to, round_to(acc, out.dtype.element_ty), mask=column < DC)
    tl.store(lse + program, level)
