"""Products by head given in FP8, under the interpreter, against the two operators one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.providers.triton.heads import heads_quantise
from gnomon.attention.providers.triton.linear_quantise import quantise_rows

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def drawn(num_rows: int, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Small whole numbers, so that every sum is exact in fp32: x [M, H, K], weight [H, K, N]."""
    generator = Generator().manual_seed(num_rows)
    num_heads, depth, width = shape
    x = torch.randint(-4, 5, (num_heads, num_rows, depth), generator=generator).to(dtype)
    weight = torch.randint(-3, 4, (num_heads, width, depth), generator=generator).to(dtype)
    return x.transpose(0, 1), weight.transpose(1, 2)


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    (1, (2, 64, 128), False, BF16),
    (17, (3, 40, 256), True, BF16),
    (17, (2, 64, 128), False, FP16),
    (5, (2, 64, 128), True, FP32),
    (70, (32, 16, 128), False, BF16),  # blocks of 64 rows
    (64, (2, 32, 96), False, BF16),  # no whole groups: one by one
    (0, (2, 8, 128), False, BF16),
]


@pytest.mark.parametrize(("num_rows", "shape", "is_power_of_two", "dtype"), CASES)
def test_as_the_product_and_the_quantiser(
    num_rows: int, shape: tuple[int, int, int], is_power_of_two: bool, dtype: torch.dtype
) -> None:
    x, weight = drawn(num_rows, shape, dtype)
    product = torch.einsum("mhk,hkn->mhn", x.double(), weight.double()).to(dtype).flatten(1)
    found = heads_quantise(x, weight, is_power_of_two)
    assert found[0].shape == (num_rows, shape[0] * shape[2])
    same(found, quantise_rows(product, is_power_of_two))


def test_nan_stays_in_its_row_and_head() -> None:
    x, weight = drawn(3, (2, 64, 128), torch.bfloat16)
    clean = heads_quantise(x, weight, False)
    x = x.clone()
    x[1, 1, 5] = math.nan
    codes, scales = heads_quantise(x, weight, False)
    assert bool(codes[1, 128:].float().isnan().all())
    kept = torch.ones(3, 256, dtype=torch.bool)
    kept[1, 128:] = False
    assert torch.equal(codes.float()[kept], clean[0].float()[kept])
    assert bool(scales.isfinite().all())
