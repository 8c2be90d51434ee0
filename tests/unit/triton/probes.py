"""Kernels around single functions of language.py, so that tests can look at what they return.

Imported by conftest.py while TRITON_INTERPRET=1 is set, as every kernel here has to be.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.attention.providers.triton import language

BLOCK = 256


@triton.jit
def encode(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    tl.store(out + at, language.encode_e4m3(tl.load(x + at), False))


@triton.jit
def decode(codes, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, language.decode_e4m3(tl.load(codes + at), False))


@triton.jit
def scale(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    tl.store(out + at, language.power_of_two_scale(tl.load(x + at)))


@triton.jit
def code_scale(amax, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    exponent = language.e4m3_exponent(tl.load(amax + at))
    tl.store(out + at, language.from_exponent(exponent))


@triton.jit
def amax(x, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)
    block = tl.load(x + row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    tl.store(out + row, language.finite_amax(block, 1))


@triton.jit
def round(x, out, cast, wide, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    tl.store(wide + at, language.rounded(tl.load(x + at), out.dtype.element_ty))
    tl.store(out + at, language.round_to(tl.load(x + at), out.dtype.element_ty))
    tl.store(cast + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def dot(a, b, out, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = row * SIZE + column
    product = language.dot(tl.load(a + at), tl.load(b + at))
    product = language.dot_into(tl.load(a + at), tl.load(b + at), product)
    tl.store(out + at, product)
