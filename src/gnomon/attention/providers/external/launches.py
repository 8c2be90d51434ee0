"""What adapters do to operands on a GPU, each in one launch: pack, encode, and clear.

In:  operands as the operators get them, any strides. Out: operands as the libraries want them.
`codes_of_rows`: e4m3 codes and scales of values that hold them exactly (codes.py says what).
`packed_operands`, `packed_lists`: padding.py's pads. `hide_tails`, `clear_blind`: −inf behind a
row's keys, and 0 and −inf for rows that see nothing, touching only what changes. `mixed_rows`:
weighted sums of rows that experts computed. `pages_of_rows`: page tables by row.
Imported only where a tensor is on a GPU; nothing here waits for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.providers.triton.language import (
    encode_e4m3,
    has_native_fp8,
    is_finite,
    padded,
    power_of_two_scale,
    round_to,
)

ROWS = 16
HEADS = 4
TAIL = 2048
PAGES = 256


@triton.jit
def _encode(
    x, weights, codes, scales, factor, num_rows, X_ROW, X_HEAD, W_ROW, W_HEAD,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows r = (row, head) of x: codes [r, D]; scales [r], times factor and weight if there are."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    columns = tl.arange(0, DP)
    row, head = rows // H, rows % H
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < D)[None]
    at = (row * X_ROW + head * X_HEAD)[:, None] + columns[None]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    finite = is_finite(values)
    largest = tl.max(tl.where(finite, tl.abs(values), 0.0), 1)
    is_bad = tl.max(tl.where(finite, 0, 1), 1) > 0
    scale = power_of_two_scale(tl.math.div_rn(tl.maximum(largest, 1e-4), 448.0))
    encoded = encode_e4m3(values * tl.math.div_rn(1.0, scale)[:, None], NATIVE)
    tl.store(codes + rows[:, None] * D + columns[None], encoded, mask=mask)
    held = scale
    if HAS_WEIGHTS:
        weight = tl.load(weights + row * W_ROW + head * W_HEAD, mask=is_row, other=0.0)
        held = scale * (weight.to(tl.float32) * factor)
    tl.store(scales + rows, tl.where(is_bad, float("nan"), held), mask=is_row)


def codes_of_rows(
    values: Tensor, weights: Tensor | None = None, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(codes e4m3 [M, H, D], scales fp32 [M, H]) of values [M, H, D]; see the kernel."""
    num_rows, num_heads, dim = values.shape
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty((num_rows, num_heads), dtype=torch.float32, device=values.device)
    held = scales if weights is None else weights
    count = num_rows * num_heads
    _encode[(triton.cdiv(count, ROWS),)](
        values, held, codes, scales, factor, count,
        values.stride(0), values.stride(1), held.stride(0), held.stride(1),
        H=num_heads, D=dim, DP=padded(dim), BR=ROWS,
        HAS_WEIGHTS=weights is not None, NATIVE=has_native_fp8(values.device),
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def put_list(row, part, slots, lists, W, S_ROW, HELD: tl.constexpr, BLOCK: tl.constexpr):
    """Part of a row's list: slots as int32, −1 from place W on."""
    place = part * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(slots + row * S_ROW + place, mask=place < W, other=-1)
    tl.store(lists + row * HELD + place, ids.to(tl.int32), mask=place < HELD)


@triton.jit
def _pack(
    latent, rope, query, slots, lists, L_ROW, L_HEAD, R_ROW, R_HEAD, W, S_ROW,
    H: tl.constexpr, HP: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr,
    DCP: tl.constexpr, DRP: tl.constexpr, BH: tl.constexpr, HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """query[row, head] = [latent | rope] of its head, or zeros from head H on; then lists[row]."""
    HEAD_BLOCKS: tl.constexpr = (HP + BH - 1) // BH
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < HEAD_BLOCKS:
        head = part.to(tl.int64) * BH + tl.arange(0, BH)
        target = query + row * HP * (DC + DR) + head[:, None] * (DC + DR)
        column = tl.arange(0, DCP)
        mask = (head < H)[:, None] & (column < DC)[None]
        held = tl.load(latent + row * L_ROW + head[:, None] * L_HEAD + column, mask=mask, other=0.0)
        tl.store(target + column[None], held, mask=(column < DC)[None] & (head < HP)[:, None])
        turned = tl.arange(0, DRP)
        mask = (head < H)[:, None] & (turned < DR)[None]
        held = tl.load(rope + row * R_ROW + head[:, None] * R_HEAD + turned, mask=mask, other=0.0)
        tl.store(target + DC + turned[None], held, mask=(turned < DR)[None] & (head < HP)[:, None])
    else:
        put_list(row, part - HEAD_BLOCKS, slots, lists, W, S_ROW, HELD, BLOCK)


def packed_operands(
    q_latent: Tensor, q_rope: Tensor, held_heads: int, slots: Tensor, held_width: int
) -> tuple[Tensor, Tensor]:
    """(query [R, held_heads, D_c + D_r], lists int32 [R, held_width]).

    Of q_latent [R, H, D_c] and q_rope [R, H, D_r], zeros behind H, and of slots [R, W], −1 behind
    W. Lists that are held so already are given back as they are.
    """
    num_rows, num_heads, rank = q_latent.shape
    width = q_rope.shape[-1]
    query = q_latent.new_empty((num_rows, held_heads, rank + width))
    is_held = slots.dtype == torch.int32 and slots.shape[1] == held_width and slots.is_contiguous()
    lists = slots if is_held else slots.new_empty((num_rows, held_width), dtype=torch.int32)
    parts = 0 if is_held else triton.cdiv(held_width, TAIL)
    _pack[(num_rows, triton.cdiv(held_heads, HEADS) + parts)](
        q_latent, q_rope, query, slots, lists, *q_latent.stride()[:2], *q_rope.stride()[:2],
        slots.shape[1], slots.stride(0),
        H=num_heads, HP=held_heads, DC=rank, DR=width,
        DCP=padded(rank), DRP=padded(width), BH=HEADS, HELD=held_width, BLOCK=TAIL,
    )  # fmt: skip
    return query, lists


@triton.jit
def _lists(slots, lists, W, S_ROW, HELD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    put_list(row, tl.program_id(1), slots, lists, W, S_ROW, HELD, BLOCK)


def packed_lists(slots: Tensor, held_width: int) -> Tensor:
    """Slots [R, W] as int32 [R, held_width], −1 behind W."""
    num_rows, width = slots.shape
    lists = slots.new_empty((num_rows, held_width), dtype=torch.int32)
    _lists[(num_rows, triton.cdiv(held_width, TAIL))](
        slots, lists, width, slots.stride(0), HELD=held_width, BLOCK=TAIL
    )
    return lists


@triton.jit(do_not_specialize=["width", "ROW"], do_not_specialize_on_alignment=["count"])
def _hide(scores, count, width, ROW, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    seen = tl.load(count + row)
    if first + BLOCK > seen:
        column = first + tl.arange(0, BLOCK)
        mask = (column >= seen) & (column < width)
        tl.store(scores + row * ROW + column, float("-inf"), mask=mask)


def hide_tails(scores: Tensor, count: Tensor) -> Tensor:
    """Write −inf into columns count[m].. of scores [M, N] fp32; the rest is not touched."""
    num_rows, width = scores.shape
    grid = (num_rows, triton.cdiv(width, TAIL))
    _hide[grid](scores, count, width, scores.stride(0), BLOCK=TAIL)
    return scores


@triton.jit(do_not_specialize=["LSE_ROW", "LSE_HEAD"])
def _clear(out, lse, visible, OUT_ROW, LSE_ROW, LSE_HEAD, H: tl.constexpr, HP: tl.constexpr,
           WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(visible + row) == 0:
        heads = tl.arange(0, HP)
        tl.store(lse + row * LSE_ROW + heads * LSE_HEAD, float("-inf"), mask=heads < H)
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(out + row * OUT_ROW + at, 0.0, mask=at < WIDTH)


def clear_blind(out: Tensor, lse: Tensor, visible: Tensor) -> None:
    """0 in out [M, H, Dv] (rows contiguous), −inf in lse [M, H] where a row sees nothing."""
    num_rows, num_heads, dim = out.shape
    _clear[(num_rows,)](
        out, lse, visible, out.stride(0), lse.stride(0), lse.stride(1),
        H=num_heads, HP=padded(num_heads), WIDTH=num_heads * dim, BLOCK=TAIL,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["P_ROW", "WIDTH"],  # as wide as the longest request of a step
    do_not_specialize_on_alignment=["pages", "request", "count"],
)
def _tables(pages, request, count, tables, P_ROW, WIDTH, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    if first * PAGE < tl.load(count + row):
        owner = tl.maximum(tl.load(request + row), 0).to(tl.int64)
        column = first + tl.arange(0, BLOCK)
        mask = column < WIDTH
        tl.store(
            tables + row * WIDTH + column, tl.load(pages + owner * P_ROW + column, mask=mask), mask
        )


def pages_of_rows(pages: Tensor, request: Tensor, count: Tensor, page_size: int) -> Tensor:
    """[M, P] of pages [B, P]: of request[m], written as far as count[m] entries reach."""
    num_rows, width = request.shape[0], pages.shape[1]
    tables = torch.empty((num_rows, width), dtype=torch.int32, device=pages.device)
    grid = (num_rows, triton.cdiv(width, PAGES))
    _tables[grid](
        pages, request, count, tables, pages.stride(0), width, PAGE=page_size, BLOCK=PAGES
    )
    return tables


@triton.jit
def _mix(out, place, ids, weights, mixed, D, I_ROW, W_ROW, W_COL,
         K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(K):
        if tl.load(ids + row * I_ROW + j) >= 0:
            at = tl.load(place + row * K + j)
            weight = tl.load(weights + row * W_ROW + j * W_COL).to(tl.float32)
            part = tl.load(out + at * D + column, mask=column < D, other=0.0).to(tl.float32)
            total += weight * part
    held = round_to(total, mixed.dtype.element_ty)
    tl.store(mixed + row * D + column, held, mask=column < D)


def mixed_rows(out: Tensor, place: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[R, D] = Σ_j weights[r, j] · out[place[r, j]] in fp32, over the j with ids[r, j] >= 0."""
    num_rows, num_choices = ids.shape
    ids = ids.contiguous()
    width = out.shape[1]
    mixed = out.new_empty((num_rows, width))
    _mix[(num_rows, triton.cdiv(width, TAIL))](
        out, place, ids, weights, mixed, width,
        ids.stride(0), weights.stride(0), weights.stride(1), K=num_choices, BLOCK=TAIL,
    )  # fmt: skip
    return mixed
