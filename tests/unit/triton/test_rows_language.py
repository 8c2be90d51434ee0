"""The building blocks of kernels: e4m3 codes, scales, roundings, bit for bit as torch has them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnomon.attention.layouts import float8
from gnomon.attention.providers.triton import language
from tests.unit.triton import probes


def numbers() -> Tensor:
    """4,096 fp32: every e4m3 number and midpoint, near misses, specials, and random sizes."""
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    exact = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn).float().sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    up, down = (torch.nextafter(middle, torch.full_like(middle, end)) for end in (1e9, -1e9))
    special = torch.tensor([math.nan, math.inf, -math.inf, 449.0, -1e30, 1e-30, -0.0, 2.0**-10])
    known = torch.cat((exact, middle, up, down, special))
    generator = torch.Generator().manual_seed(0)
    size = torch.randn(4096 - len(known), generator=generator).mul_(4).exp2_()
    return torch.cat((known, size * torch.randn(len(size), generator=generator)))


def test_kernels_here_run_under_the_interpreter() -> None:
    assert language.IS_INTERPRETED
    assert "cpu" in language.DEVICES


def test_codes_are_those_of_the_layouts() -> None:
    x = numbers()
    found = torch.empty(len(x), dtype=torch.uint8)
    probes.encode[(len(x) // probes.BLOCK,)](x, found, probes.BLOCK)
    assert torch.equal(found, float8.encode_e4m3(x, torch.ones(())))


def test_every_code_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = torch.empty(256)
    probes.decode[(1,)](codes, found, probes.BLOCK)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.view(torch.int32) == 0, expected.view(torch.int32) == 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_scales_are_those_of_the_layouts() -> None:
    x = numbers().abs().nan_to_num(1.0, 1.0, 1.0).clamp_min(1e-30)
    found = torch.empty(len(x))
    probes.scale[(len(x) // probes.BLOCK,)](x, found, probes.BLOCK)
    assert torch.equal(found, float8.ceil_power_of_two(x))


def test_scales_of_codes_are_those_of_the_rounded_quotient() -> None:
    edges = 448.0 * torch.arange(-90.0, 100.0).exp2()
    near = [torch.nextafter(edges, torch.full_like(edges, end)) for end in (0.0, math.inf)]
    x = torch.cat((edges, *near, numbers().abs().nan_to_num(1.0, 1.0, 1.0).clamp_min(1e-30)))
    x = x[: len(x) // probes.BLOCK * probes.BLOCK].contiguous()
    found = torch.empty(len(x))
    probes.code_scale[(len(x) // probes.BLOCK,)](x, found, probes.BLOCK)
    assert torch.equal(found, float8.ceil_power_of_two(x / 448.0))


def test_the_largest_magnitude_leaves_out_what_is_not_finite() -> None:
    x = torch.tensor([[1.0, -3.0, 2.0, 0.0], [math.nan, -1.0, -math.inf, 0.5], [math.inf] * 4])
    found = torch.empty(4)
    probes.amax[(1,)](torch.cat((x, -x[:1])), found, 4, 4)
    assert found.tolist() == [3.0, 1.0, 0.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_to_nearest_even(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=generator, dtype=torch.int64)
    ties = (bits & ~0x7FFF) | 0x8000
    x = torch.cat((bits[:2048], ties[2048:])).to(torch.int32).view(torch.float32)
    found, cast = torch.empty(len(x), dtype=dtype), torch.empty(len(x), dtype=dtype)
    wide = torch.empty(len(x))
    probes.round[(len(x) // probes.BLOCK,)](x, found, cast, wide, probes.BLOCK)
    torch.testing.assert_close(wide, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cast, x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dots_are_summed_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    found = torch.empty(16, 16)
    probes.dot[(1,)](a, b, found, 16)
    torch.testing.assert_close(found.double(), 2 * a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("width", "least", "block"), [(1, 1, 1), (48, 1, 64), (8, 16, 16)])
def test_blocks_are_padded_to_powers_of_two(width: int, least: int, block: int) -> None:
    assert language.padded(width, least) == block
