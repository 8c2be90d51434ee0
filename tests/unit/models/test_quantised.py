"""Block FP8, against loops over blocks in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnomon.models.config import BlockFp8
from gnomon.models.quantised import (
    dequantise_blocks,
    keeps_fp8,
    quantise_blocks,
    scale_shape,
    why_kept,
)

sizes = st.integers(1, 11)


def by_loops(codes: Tensor, scales: Tensor, block: BlockFp8) -> Tensor:
    """value[r, c] = code[r, c] × scale[r // rows, c // columns], one element at a time."""
    values = torch.zeros(codes.shape, dtype=torch.float64)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            scale = float(scales[row // block.block_rows, column // block.block_columns])
            values[row, column] = float(codes[row, column].float()) * scale
    return values


@given(rows=sizes, columns=sizes, high=sizes, wide=sizes, seed=st.integers(0, 99))
def test_dequantises_every_edge_block(
    rows: int, columns: int, high: int, wide: int, seed: int
) -> None:
    block = BlockFp8(high, wide, False, ())
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape((rows, columns), block), generator=generator) + 0.1
    expected = by_loops(codes, scales, block)
    exact = dequantise_blocks(codes, scales, block, torch.float64)
    assert torch.equal(exact, expected)
    assert torch.equal(dequantise_blocks(codes, scales, block), expected.float())


def test_576_rows_have_a_last_block_of_64() -> None:
    """kv_a_proj_with_mqa of the published models; transformers' loader fails on it."""
    block = BlockFp8(128, 128, True, ())
    assert scale_shape((576, 7168), block) == (5, 56)
    scales = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]).view(5, 1)
    codes = torch.ones(576, 128).to(torch.float8_e4m3fn)
    column = dequantise_blocks(codes, scales, block)[:, 0]
    assert column.tolist() == [float(2 ** (row // 128)) for row in range(576)]


@given(rows=sizes, columns=sizes, seed=st.integers(0, 99), exponent=st.integers(-8, 8))
@pytest.mark.parametrize("is_power", [False, True])
def test_quantisation_error_is_half_a_code(
    is_power: bool, rows: int, columns: int, seed: int, exponent: int
) -> None:
    """|error| <= 2^-4 relative for normal codes, half the least subnormal below; no overflow."""
    block = BlockFp8(4, 3, is_power, ())
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, rows, columns, generator=generator) * 2.0**exponent
    codes, scales = quantise_blocks(values, block)
    assert scales.shape == scale_shape(values.shape, block)
    assert bool(torch.isfinite(codes.float()).all())
    for part in range(2):
        back = by_loops(codes[part], scales[part], block)
        of_each = by_loops(torch.ones(rows, columns).to(codes.dtype), scales[part], block)
        bound = torch.maximum(values[part].abs().double() / 16, of_each * 2.0**-10)
        assert bool(((back - values[part]).abs() <= bound * (1 + 1e-6)).all())
    if is_power:
        assert all(math.frexp(scale)[0] == 0.5 for scale in scales.flatten().tolist())


def test_largest_magnitude_becomes_448() -> None:
    codes, scales = quantise_blocks(torch.tensor([[3.0, -7.0]]), BlockFp8(1, 2, False, ()))
    assert codes.float().tolist()[0][1] == -448.0
    assert scales.item() == pytest.approx(7.0 / 448)


def test_quantising_twice_changes_nothing() -> None:
    block = BlockFp8(8, 8, True, ())
    values = torch.randn(20, 20, generator=torch.Generator().manual_seed(3))
    once = dequantise_blocks(*quantise_blocks(values, block), block)
    assert torch.equal(dequantise_blocks(*quantise_blocks(once, block), block), once)


def test_block_of_zeros() -> None:
    codes, scales = quantise_blocks(torch.zeros(2, 2), BlockFp8(2, 2, True, ()))
    assert (codes.float() == 0).all()
    assert scales.item() == 1.0


def test_codes_of_nan_stay_nan() -> None:
    codes = torch.tensor([[0x7F, 0xFF, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = dequantise_blocks(codes, torch.ones(1, 1), BlockFp8(4, 4, True, ()))
    assert torch.isnan(values).tolist() == [[True, True, False]]
    assert values[0, 2] == 1.0


@pytest.mark.parametrize(
    ("device", "capability", "size", "said"),
    [
        ("cuda", (9, 0), 128, "this GPU multiplies FP8"),
        ("cuda", (8, 9), 128, "this GPU multiplies FP8"),
        ("cuda", (8, 0), 128, "compute capability 8.0; unasked they stay FP8 from 8.9 on"),
        ("cuda", (9, 0), 64, "no kernel multiplies blocks of 64 x 64"),
        ("cpu", None, 128, "a CPU multiplies no FP8"),
    ],
)
def test_what_becomes_of_fp8_weights_has_its_reason(
    device: str, capability: tuple[int, int] | None, size: int, said: str
) -> None:
    block = BlockFp8(size, size, False, ())
    is_kept = keeps_fp8("auto", block, device, capability)
    assert said in why_kept(is_kept, block, device, capability)
