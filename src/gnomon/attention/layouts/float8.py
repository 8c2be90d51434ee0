"""Numbers in e4m3 with a power-of-two scale per group: the arithmetic that packed layouts share.

In:  float values and the scale of their group. Out: e4m3 codes as uint8 and float32 scales.
Scale: the least power of two that is not below amax / 448, found from the float's bits (exponent,
     plus one if the mantissa is not zero), so that float32, bfloat16 and E8M0 readers agree to the
     bit. Two floors exist (the maths of the official kernels), each part of its layout's version:
     latents max(amax / 448, 1e-4), that is scale >= 2^-13; index keys max(amax, 1e-4) / 448, that
     is scale >= 2^-22.
Codes: x / scale, clamped to [-448, 448], rounded to nearest, ties to even.
NaN: a value that is not finite (NaN, +inf, -inf) is stored as the code 0x7f and takes no part in
     amax: it comes back as NaN where it stood, and its neighbours keep their values.
float64 values are rounded to float32 first. Scales are little-endian, as the host's floats are.
Not here: where codes and scales lie in a page (the layouts).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
NAN_CODE = 0x7F
MIN_LATENT_SCALE = 1e-4
MIN_INDEX_AMAX = 1e-4


def ceil_power_of_two(values: Tensor) -> Tensor:
    """Least power of two >= each value; float32, normal and below 2^127."""
    bits = values.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def latent_scale(amax: Tensor) -> Tensor:
    """Scale of a group of latents whose largest magnitude is `amax` (float32)."""
    return ceil_power_of_two((amax / E4M3_MAX).clamp_min(MIN_LATENT_SCALE))


def index_key_scale(amax: Tensor) -> Tensor:
    """Scale of an index key (or index query) whose largest magnitude is `amax` (float32)."""
    return ceil_power_of_two(amax.clamp_min(MIN_INDEX_AMAX) / E4M3_MAX)


def finite_amax(values: Tensor) -> Tensor:
    """Largest finite magnitude along the last dimension, float32 [...]; 0 if there is none."""
    magnitude = values.to(torch.float32).abs()
    is_finite = magnitude < torch.inf  # false for NaN too
    return magnitude.where(is_finite, 0.0).amax(dim=-1)


def encode_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """Codes, uint8 [..., n], of values [..., n] under scale [...] (float32, a power of two)."""
    wide = values.to(torch.float32)
    # The clamp is ours: what a cast does beyond 448 differs between devices and torch versions.
    scaled = (wide / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.where(wide.abs() < torch.inf, NAN_CODE)


def decode_e4m3(codes: Tensor, scale: Tensor) -> Tensor:
    """Values, float32 [..., n], of codes uint8 [..., n] under scale float32 [...]."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32) * scale.unsqueeze(-1)


def e4m3_bound(values: Tensor, scale: Tensor) -> Tensor:
    """Largest rounding error of values [..., n] under scale [...], float64.

    Half a unit in the last of the three mantissa bits, or half the smallest subnormal (2^-9).
    """
    magnitude = values.double().abs()
    return torch.maximum(magnitude * 2.0**-4, scale.double().unsqueeze(-1) * 2.0**-10)


def typed_columns(rows: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Columns start .. stop-1 of uint8 rows [..., bytes], seen as `dtype`; copied if misaligned."""
    part = rows[..., start:stop]
    size = dtype.itemsize
    is_aligned = part.storage_offset() % size == 0 and part.stride(-1) == 1
    if not (is_aligned and all(stride % size == 0 for stride in part.stride()[:-1])):
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(dtype)
