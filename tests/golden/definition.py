"""The packed formats from their definition, in exact arithmetic: loops, integers, fractions.

In:  float32 values as Python floats. Out: the bytes that a token or a page must have.
It shares nothing with gnomon (not even torch), so it is the oracle of tests/unit/layouts, and it
built the files beside it: `python tests/golden/definition.py` writes them anew. README.md there
says what they hold.
"""

from __future__ import annotations

import math
import random
import struct
from bisect import bisect_left
from fractions import Fraction
from pathlib import Path

FOLDER = Path(__file__).parent
NAN_CODE = 0x7F
NUM_GOLDEN_TOKENS = 12


def e4m3_value(code: int) -> Fraction:
    """Value of an e4m3 code other than NaN: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent:
        magnitude = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    else:
        magnitude = Fraction(mantissa, 8) * Fraction(2) ** -6
    return -magnitude if code & 0x80 else magnitude


POSITIVE = [e4m3_value(code) for code in range(NAN_CODE)]  # ascending, last 448


def e4m3_code(value: Fraction, is_negative: bool) -> int:
    """Nearest code, ties to the even one, saturating at 448; the sign of a zero is kept."""
    magnitude = min(abs(value), POSITIVE[-1])
    above = bisect_left(POSITIVE, magnitude)
    code = above
    if POSITIVE[above] != magnitude:
        low, high = magnitude - POSITIVE[above - 1], POSITIVE[above] - magnitude
        is_low_nearer = low < high or (low == high and above % 2 == 1)
        code = above - 1 if is_low_nearer else above
    return code | (0x80 if is_negative else 0)


def power_of_two_from(value: Fraction) -> Fraction:
    """Least power of two that is not below `value` (> 0)."""
    power = Fraction(1)
    while power < value:
        power *= 2
    while power / 2 >= value:
        power /= 2
    return power


def group_codes(values: list[float], scale: Fraction) -> bytes:
    codes = []
    for value in values:
        if math.isfinite(value):
            is_negative = math.copysign(1.0, value) < 0
            codes.append(e4m3_code(Fraction(value) / scale, is_negative))
        else:
            codes.append(NAN_CODE)
    return bytes(codes)


def amax_of(values: list[float]) -> Fraction:
    return max((abs(Fraction(v)) for v in values if math.isfinite(v)), default=Fraction(0))


def latent_scale(values: list[float]) -> Fraction:
    return power_of_two_from(max(amax_of(values) / 448, Fraction(1, 10000)))


def index_scale(values: list[float]) -> Fraction:
    return power_of_two_from(max(amax_of(values), Fraction(1, 10000)) / 448)


def bf16_bytes(value: float) -> bytes:
    """bfloat16 of a float32: the upper half of its bits, rounded to nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if not math.isnan(value):
        upper, rest = bits >> 16, bits & 0xFFFF
        if rest > 0x8000 or (rest == 0x8000 and upper % 2 == 1):
            upper += 1
        return struct.pack("<H", upper)
    return struct.pack("<H", 0x7FC0)


def fp8_ds_mla_token(latent: list[float], rope: list[float], empty_slot: int = 0) -> bytes:
    """Codes of all latents, float32 scale of each group of 128 (or of the whole), bf16 rope."""
    width = min(len(latent), 128)
    groups = [latent[i : i + width] for i in range(0, len(latent), width)]
    scales = [latent_scale(group) for group in groups]
    codes = b"".join(group_codes(g, s) for g, s in zip(groups, scales, strict=True))
    scale_bytes = b"".join(struct.pack("<f", float(scale)) for scale in scales)
    return codes + scale_bytes + b"".join(map(bf16_bytes, rope)) + bytes(2 * empty_slot)


def index_k_token(key: list[float]) -> tuple[bytes, bytes]:
    """Codes of a key, and its float32 scale."""
    scale = index_scale(key)
    return group_codes(key, scale), struct.pack("<f", float(scale))


def index_k_page(keys: list[list[float]]) -> bytes:
    """A page: the codes of all its tokens, then all their scales."""
    tokens = [index_k_token(key) for key in keys]
    return b"".join(codes for codes, _ in tokens) + b"".join(scale for _, scale in tokens)


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def next_float32(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", bits + 1))[0])


def golden_values(width: int, seed: int) -> list[list[float]]:
    """Tokens that walk along the format's edges; `width` float32 numbers each."""
    draw = random.Random(seed)
    normal = [[float32(draw.gauss(0.0, 1.0)) for _ in range(width)] for _ in range(4)]
    ramp = [float32((i - width // 2) / 16) for i in range(width)]  # ties of the rounding
    zeros = [0.0, -0.0] * (width // 2)
    tiny = [float32(draw.gauss(0.0, 1e-6)) for _ in range(width)]  # the floor of the scale
    subnormal = [float32(2.0**-140 * i) for i in range(width)]
    exact_edge = [448.0, -448.0] + [float32(i) for i in range(width - 2)]  # scale 1 or 2
    over_edge = [next_float32(448.0)] + [float32(i / 2) for i in range(width - 1)]
    huge = [float32(draw.gauss(0.0, 1e30)) for _ in range(width)]
    mixed = [float32(draw.gauss(0.0, 1.0) * 10.0 ** draw.randint(-8, 3)) for _ in range(width)]
    return [*normal, ramp, zeros, tiny, subnormal, exact_edge, over_edge, huge, mixed]


def golden_files() -> dict[str, bytes]:
    """Name -> content of each golden file."""
    tokens, keys = golden_values(576, seed=656), golden_values(128, seed=132)
    latents = b"".join(fp8_ds_mla_token(t[:512], t[512:]) for t in tokens)
    nope_slot = b"".join(fp8_ds_mla_token(t[:512], [], 64) for t in tokens)
    nope = b"".join(fp8_ds_mla_token(t[:512], []) for t in tokens)
    return {
        "latents.f32": b"".join(struct.pack("<576f", *token) for token in tokens),
        "index_keys.f32": b"".join(struct.pack("<128f", *key) for key in keys),
        "fp8_ds_mla_656.bin": latents,
        "fp8_ds_mla_656_nope.bin": nope_slot,
        "fp8_ds_mla_528.bin": nope,
        "index_k_132_page12.bin": index_k_page(keys),
    }


def main() -> None:
    for name, content in golden_files().items():
        (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
