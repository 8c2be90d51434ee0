"""Device code of sparse MLA: entries of a block of slots, and queries, as dots take them.

In:  the bytes or numbers of a pool, int64 slots, strides; queries of any strides. Out: blocks in
     the dtype of the dots, zeros in padding; plain latents perhaps a part of their columns at once.
Packed latents (fp8_ds_mla): codes times power-of-two scales. In fp16 that product is exact for
     scales of 2^-15 .. 2^7 (finer ones lose what is below 2^-25, larger ones overflow to infinity,
     which a normalised latent never reaches). The rope part stays in its own dtype. fp32 queries
     read fp32.
Not here: the loop over keys (attention_lists.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.language import INTERPRETED, round_to


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
def appended(blocks, block):
    """The tuple of ``blocks`` and one more."""
    return blocks + (block,)  # noqa: RUF005 (Triton compiles no starred tuple)


@triton.jit
def load_latents(
    entries, slot, page_stride, FIRST: tl.constexpr, C: tl.constexpr,
    DC: tl.constexpr, DCP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + C − 1 of the latents [BN, DCP] of a block of slots in DTYPE.

    GROUPS scales a token, whose columns come all together; 0 for plain pools.
    """
    tl.static_assert(GROUPS == 0 or C == DCP)
    column = FIRST + tl.arange(0, C)
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
def load_query(q, row, head, strides_row, strides_head, stride, FIRST: tl.constexpr,
               D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr):  # fmt: skip
    """Heads [BH, DP] of a row of q, from column FIRST on, as stored; zeros beyond H heads and D."""
    column = FIRST + tl.arange(0, DP)
    place = q + row * strides_row + head[:, None] * strides_head + column[None, :] * stride
    mask = (head < H)[:, None]
    if FIRST + DP > D:
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


@triton.jit
def latent_parts(
    entries, slot, page_stride,
    DC: tl.constexpr, DCP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """PARTS blocks [BN, DCP / PARTS] of neighbouring columns: the latents of a block of slots."""
    C: tl.constexpr = DCP // PARTS
    found = ()
    for part in tl.static_range(PARTS):
        block = load_latents(
            entries, slot, page_stride, part * C, C, DC, DCP, GROUPS, WIDTH, PAGE, NATIVE, DTYPE
        )
        found = appended(found, block)
    return found


@triton.jit
def query_parts(q, row, head, strides_row, strides_head, stride, DC: tl.constexpr,
                DCP: tl.constexpr, H: tl.constexpr, DTYPE: tl.constexpr,
                PARTS: tl.constexpr):  # fmt: skip
    """The heads of a row of q in DTYPE, cut as `latent_parts` cuts latents."""
    C: tl.constexpr = DCP // PARTS
    found = ()
    for part in tl.static_range(PARTS):
        loaded = load_query(q, row, head, strides_row, strides_head, stride, part * C, DC, C, H)
        found = appended(found, converted(loaded, DTYPE))
    return found


@triton.jit
def zero_parts(ROWS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """PARTS blocks [ROWS, C] of zeros in fp32."""
    found = ()
    for _part in tl.static_range(PARTS):
        found = appended(found, tl.zeros([ROWS, C], tl.float32))
    return found
