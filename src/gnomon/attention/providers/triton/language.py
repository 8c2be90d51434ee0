"""What every Triton kernel here is written with: dots, roundings and e4m3 that mean the same on a
GPU and under the interpreter.

In:  blocks inside kernels; on the host, widths and devices.
Out: `dot` (IEEE, never TF32), `round_to` and `rounded` (nearest, ties to even), `finite_amax`,
     `encode_e4m3`, `decode_e4m3`, scales (the arithmetic of layouts/float8.py, to the bit).
Interpreter (TRITON_INTERPRET=1 before triton is first imported): arithmetic on bf16 blocks acts on
     their bits, a cast to bf16 truncates and one to fp8 loses carries. So kernels cast to fp32
     right after each load, and cast down through `round_to` only.
e4m3: NATIVE (a constexpr of the kernel, `has_native_fp8` on the host) uses the conversions of
     sm_89 and newer; else, and under the interpreter, codes are made and read by integer bits.
Not here: kernels (rows, cache, index, attention, moe), which bytes a layout has (layout_rows.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETED = tl.constexpr(IS_INTERPRETED)
DEVICES = frozenset({"cuda", "cpu"}) if IS_INTERPRETED else frozenset({"cuda"})
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

E4M3_MAX = tl.constexpr(448.0)

# A launch option of kernels whose bits may not hang on what they are compiled with: no product and
# sum become one rounding. Memory bounds them, so that it costs nothing.
UNFUSED = {"enable_fp_fusion": False}


def padded(width: int, least: int = 1) -> int:
    """The power of two that a block of ``width`` columns is padded to; ``least`` 16 for a dot."""
    return max(least, 1 << (width - 1).bit_length() if width > 1 else 1)


def has_native_fp8(device: torch.device) -> bool:
    """Whether kernels on ``device`` may use e4m3 conversions: sm_89 and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def dot(a, b):
    """Product of a [M, K] and b [K, N] in fp32; fp32 blocks are multiplied in fp32, not in TF32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_into(a, b, acc):
    """``acc`` [M, N] fp32 plus a · b."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 block ``x`` in ``dtype``, to nearest, ties to even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 block ``x`` rounded to ``dtype`` as `round_to` does, in fp32 again."""
    if dtype == tl.bfloat16 and not INTERPRETED:
        # Two numbers a conversion: apart, each takes one at a quarter of the rate.
        bits = tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }""",
            "=r,=r,r,r",
            [x.to(tl.uint32, bitcast=True)],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return round_to(x, dtype).to(tl.float32)


@triton.jit
def is_finite(x):
    """Whether fp32 numbers are neither NaN nor infinite."""
    return (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def finite_amax(x, axis: tl.constexpr):
    """Largest finite magnitude of ``x`` along ``axis``; 0, or NaN on a GPU, if there is none."""
    if INTERPRETED:
        return tl.max(tl.where(is_finite(x), tl.abs(x), 0.0), axis)
    else:
        # A number that is not finite times 0 is NaN, which the maximum leaves out.
        return tl.max(tl.fma(x, 0.0, tl.abs(x)), axis)


@triton.jit
def divide(x, y, inverse):
    """Divide x by y, rounded as IEEE has it, by products; ``inverse``: 1 / y, rounded likewise.

    For normal y and quotients. The remainder of a first quotient is exact in a fused product, so
    that one more step rounds rightly (Markstein 1990). The interpreter has no fused product.
    """
    if INTERPRETED:
        return tl.math.div_rn(x, y)
    else:
        first = x * inverse
        return tl.fma(tl.fma(-first, y, x), inverse, first)


@triton.jit
def power_of_two_scale(x):
    """Least power of two >= each x (fp32, normal, positive), from its bits."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_exponent(amax):
    """Biased exponent, int32, of the least power of two that is >= amax / 448, for normal ``amax``.

    448 is 1.75 · 2^8: the quotient passes a power of two where the fraction passes 0.75. Rounding
    the quotient first, as layouts/float8.py does, changes nothing: no fp32 number is so near above
    448 · 2^k that its quotient rounds to 2^k.
    """
    return ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8


@triton.jit
def from_exponent(exponent):
    """2^(exponent − 127) in fp32, of int32 exponents 1 .. 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """e4m3 codes (uint8) of fp32 ``x``, scaled already: clamped to ±448; 0x7f if not finite."""
    if NATIVE and not INTERPRETED:
        # The conversion clamps and gives 0x7f for NaN, which x + 0 · x makes of infinities as well.
        return tl.fma(x, 0.0, x).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        clamped = tl.minimum(tl.maximum(tl.where(is_finite(x), x, 0.0), -448.0), 448.0)
        size = tl.abs(clamped)
        bits = size.to(tl.uint32, bitcast=True)
        # At least 2^-6: cut three mantissa bits out, to even, and move the bias from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        # Below: multiples of 2^-9, which is the last place of numbers near 2^14.
        small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        magnitude = tl.where(size < 0.015625, small, normal)
        sign = (clamped.to(tl.uint32, bitcast=True) >> 24) & 0x80
        codes = (magnitude | sign).to(tl.uint8)
        return tl.where(is_finite(x), codes, 0x7F).to(tl.uint8)


@triton.jit
def decode_e4m3(codes, NATIVE: tl.constexpr):
    """fp32 values of e4m3 codes (uint8), unscaled; NaN for 0x7f and 0xff."""
    if NATIVE and not INTERPRETED:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.uint32)
        magnitude = wide & 0x7F
        # The same exponent and mantissa in fp32's places; 2^120 moves the bias from 7 to 127.
        value = ((magnitude << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
        value = value * 1.329227995784916e36
        return tl.where(magnitude == 0x7F, float("nan"), value)
