"""The arithmetic of e4m3 with power-of-two scales, against exact fractions (tests/golden)."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.layouts.float8 import (
    ceil_power_of_two,
    decode_e4m3,
    encode_e4m3,
    finite_amax,
    index_key_scale,
    latent_scale,
    typed_columns,
)
from tests.golden import definition

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Large magnitudes leave out 2^119 * 448 and above, whose scale times 448 no float32 holds.
amaxes = st.floats(min_value=0.0, max_value=2.0**127, width=32)


def scale_bits(value: Fraction) -> bytes:
    return struct.pack("<f", float(value))


def bits_of(scale: torch.Tensor) -> bytes:
    return scale.numpy().tobytes()


def edges() -> list[float]:
    """Every power of two and 448 times it, with the float32 below and above."""
    found = []
    for exponent in range(-30, 100):
        for base in (2.0**exponent, 448.0 * 2.0**exponent):
            (bits,) = struct.unpack("<I", struct.pack("<f", base))
            found += [struct.unpack("<f", struct.pack("<I", bits + d))[0] for d in (-1, 0, 1)]
    return found


def test_power_of_two_is_the_least_not_below() -> None:
    values = [value for value in edges() if value > 2.0**-29]
    got = ceil_power_of_two(torch.tensor(values))
    assert got.tolist() == [float(definition.power_of_two_from(Fraction(v))) for v in values]


@pytest.mark.parametrize("rule", ["latent", "index"])
def test_scale_at_every_edge(rule: str) -> None:
    ours = latent_scale if rule == "latent" else index_key_scale
    exact = definition.latent_scale if rule == "latent" else definition.index_scale
    for amax in [0.0, 1e-4, 1e-40, 448e-4, *edges()]:
        assert bits_of(ours(torch.tensor([amax]))) == scale_bits(exact([amax])), amax


@given(amax=amaxes)
def test_scale_of_any_amax(amax: float) -> None:
    got = torch.tensor([amax])
    assert bits_of(latent_scale(got)) == scale_bits(definition.latent_scale([amax]))
    assert bits_of(index_key_scale(got)) == scale_bits(definition.index_scale([amax]))


def test_the_two_floors_differ() -> None:
    nothing = torch.zeros(1)
    assert latent_scale(nothing).item() == 2.0**-13
    assert index_key_scale(nothing).item() == 2.0**-22


@given(values=st.lists(float32s, min_size=1, max_size=8))
def test_codes_are_the_nearest(values: list[float]) -> None:
    scale = definition.power_of_two_from(max(definition.amax_of(values) / 448, Fraction(1, 2**20)))
    got = encode_e4m3(torch.tensor([values]), torch.tensor([float(scale)]))
    assert bytes(got[0].tolist()) == definition.group_codes(values, scale)


def test_codes_at_every_midpoint_of_the_grid() -> None:
    grid = [float(value) for value in definition.POSITIVE]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(grid)]
    values = [*grid, *middles, *(definition.next_float32(v) for v in middles), 449.0, 1e30]
    values += [-value for value in values]
    got = encode_e4m3(torch.tensor(values), torch.tensor(1.0))
    assert bytes(got.tolist()) == definition.group_codes(values, Fraction(1))


def test_every_code_decodes_to_its_value() -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    got = decode_e4m3(torch.tensor(codes, dtype=torch.uint8), torch.tensor(0.5))
    assert got.tolist() == [float(definition.e4m3_value(code) / 2) for code in codes]
    nans = decode_e4m3(torch.tensor([0x7F, 0xFF], dtype=torch.uint8), torch.tensor(0.5))
    assert nans.isnan().all()


@given(code=st.integers(0, 126), exponent=st.integers(-13, 60), sign=st.sampled_from([1, -1]))
def test_representable_values_are_exact(code: int, exponent: int, sign: int) -> None:
    scale = torch.tensor(2.0**exponent)
    value = torch.tensor([sign * float(definition.POSITIVE[code]) * 2.0**exponent])
    assert decode_e4m3(encode_e4m3(value, scale), scale).tolist() == value.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_nan_and_leaves_its_group_alone(bad: float) -> None:
    values = torch.tensor([1.0, bad, -3.0])
    assert finite_amax(values).item() == 3.0
    codes = encode_e4m3(values, latent_scale(finite_amax(values)))
    assert codes[1].item() == 0x7F
    clean = encode_e4m3(values[::2], latent_scale(torch.tensor(3.0)))
    assert codes[::2].tolist() == clean.tolist()
    assert finite_amax(torch.tensor([bad, bad])).item() == 0.0


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_typed_columns_of_misaligned_bytes(offset: int) -> None:
    content = struct.pack("<fffff", 1.0, 2.0, 3.0, 4.0, 5.0)
    buffer = torch.frombuffer(bytearray(bytes(offset) + content), dtype=torch.uint8)
    rows = buffer[offset:].view(1, 20)
    assert typed_columns(rows, 4, 12, torch.float32).tolist() == [[2.0, 3.0]]
    strided = buffer[offset : offset + 18].view(2, 9)[:, :8]
    expected = [list(struct.unpack_from("<ff", content, start)) for start in (0, 9)]
    assert typed_columns(strided, 0, 8, torch.float32).tolist() == expected
