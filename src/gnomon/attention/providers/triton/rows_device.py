"""Norms and rotations of blocks that a kernel has in hand; fp32 throughout.

In:  addresses of rows, their strides and widths. Out: fp32 blocks, padding columns 0.
Maths: oracle_math.md §1.1, §1.3, §1.5. The partner of a column in a rotation is its neighbour,
found in registers, or half the rotated width away, loaded once more from the first-level cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton.language import dot, dot_into


@triton.jit
def partner_of(column, DIM: tl.constexpr):
    """The column, half of DIM away, that each of the first DIM columns is turned with.

    ``column`` [1, N] counts up from 0. The hint lets whole runs of partners be loaded at once.
    """
    partner = tl.where(column < DIM // 2, column + DIM // 2, column - DIM // 2)
    partner = tl.where(column < DIM, partner, column)
    RUN: tl.constexpr = 8 if DIM % 16 == 0 else 1
    return tl.max_contiguous(tl.multiple_of(partner, [1, RUN]), [1, RUN])


@triton.jit
def neighbours(x):
    """The numbers of x [M, N] with each pair of columns 2i and 2i + 1 exchanged."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(odd, even), (x.shape[0], x.shape[1]))


@triton.jit
def turns(cos, sin, column, is_row, DIM: tl.constexpr):
    """(cos, signed sin) of columns, in fp32; 1 and 0 where nothing turns."""
    turning = is_row & (column < DIM)
    c = tl.load(cos + column, mask=turning, other=1.0).to(tl.float32)
    s = tl.load(sin + column, mask=turning, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def rotated(here, c, s, inside, column, DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Rows at ``here`` [N, 1], columns ``column`` [1, BLOCK], rotated: fp32, 0 outside ``inside``.

    ``c``, ``s``: their turns, [1, BLOCK] or [N, BLOCK].
    """
    value = tl.load(here + column, mask=inside, other=0.0).to(tl.float32)
    if IS_INTERLEAVED:
        partner = neighbours(value)
    else:
        beside = here + partner_of(column, DIM)
        partner = tl.load(beside, mask=inside & (column < DIM), other=0.0).to(tl.float32)
    return value * c + partner * s


@triton.jit
def rotated_heads(
    x,
    cos,
    sin,
    stride,
    first,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Heads first .. first + HEADS_BLOCK − 1 of one row, rotated: fp32 [HEADS_BLOCK, BLOCK].

    ``x``: address of the row; ``cos``, ``sin``: of its rotation; ``stride`` between heads.
    """
    head = first + tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    # One row of turns, so that its own layout over the threads does not become that of the heads.
    c, s = turns(cos, sin, tl.arange(0, BLOCK), True, DIM)
    here = x + head * stride
    return rotated(here, c[None, :], s[None, :], inside, column, DIM, IS_INTERLEAVED)


@triton.jit
def layer_normed(x, mean, scale, weight, bias, column, inside):
    """(x − mean) * scale * weight + bias of columns of rows at ``x``; 0 outside."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, (value - mean) * scale * w + b, 0.0)


@triton.jit
def sylvester(BLOCK: tl.constexpr):
    """The ±1 Hadamard matrix [BLOCK, BLOCK]: minus where row & column has an odd number of bits."""
    bits = tl.arange(0, BLOCK)[:, None] & tl.arange(0, BLOCK)[None, :]
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return tl.where((bits & 1) == 1, -1.0, 1.0)


@triton.jit
def hadamard(x, BLOCK: tl.constexpr, SCALE: tl.constexpr, IS_HALF: tl.constexpr):
    """Rows of x [N, BLOCK] times the Hadamard matrix times SCALE; N and BLOCK at least 16.

    From 32 columns on the first butterfly is done apart, so that the matrix of half the width
    fits into registers.
    """
    if BLOCK >= 32:
        HALF: tl.constexpr = BLOCK // 2
        halves = tl.permute(tl.reshape(x, (x.shape[0], 2, HALF)), (0, 2, 1))
        left, right = tl.split(halves)
        total = hadamard_dot(left + right, HALF, SCALE, IS_HALF)
        difference = hadamard_dot(left - right, HALF, SCALE, IS_HALF)
        joined = tl.permute(tl.join(total, difference), (0, 2, 1))
        return tl.reshape(joined, (x.shape[0], BLOCK))
    else:
        return hadamard_dot(x, BLOCK, SCALE, IS_HALF)


@triton.jit
def hadamard_dot(x, BLOCK: tl.constexpr, SCALE: tl.constexpr, IS_HALF: tl.constexpr):
    """Rows of x [N, BLOCK] times the Hadamard matrix times SCALE, by a dot.

    Where the result is rounded to 16 bits the tensor cores do it: a number is the sum of two bf16
    to 2^-17 of its size.
    """
    if IS_HALF:
        matrix = sylvester(BLOCK).to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return dot_into(low, matrix, dot(high, matrix)) * SCALE
    else:
        return dot(x, sylvester(BLOCK)) * SCALE
