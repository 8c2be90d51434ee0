"""FP8 linears of the triton provider under the interpreter: the specs, tiles, splits, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.block_fp8 import dequantised, dequantised_rows
from gnomon.attention.dispatch import KernelSet
from gnomon.attention.providers.triton import linear, tiles
from gnomon.attention.providers.triton.tiles import Tile
from gnomon.attention.spec import SPECS, Scale, check_provider

# The interpreter turns run-time bounds of a range, arrays of one number, into ints.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAST = KernelSet("triton", 20, linear.KERNELS)
FIXED = KernelSet("triton fixed", 20, linear.FIXED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op", "kernels"),
    [("quantise_rows", FAST), ("silu_quantise", FAST), ("linear_fp8", FAST), ("linear_fp8", FIXED)],
)
def test_every_case_of_the_specs(op: str, kernels: KernelSet, dtype: torch.dtype) -> None:
    for case in SPECS[op].cases(Generator().manual_seed(1), dtype, Scale()):
        result = check_provider(SPECS[op], kernels, case, dtype)
        assert result.is_ok, result


def drawn(num_rows: int, width: int, columns: int) -> tuple[tuple[Tensor, Tensor], ...]:
    generator = Generator().manual_seed(2)
    x = linear.quantise_rows(torch.randn(num_rows, width, generator=generator), False)
    codes = (torch.randn(columns, width, generator=generator) * 100).to(torch.float8_e4m3fn)
    grid = (-(-columns // 128), -(-width // 128))
    return x, (codes, torch.rand(grid, generator=generator) + 0.5)


def product(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor:
    wide = torch.float64
    return dequantised_rows(*x, wide) @ dequantised(*weight, wide).T


@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 32, 128),
        Tile(16, 64, 128, splits=3),
        Tile(64, 128, 128),
        Tile(64, 32, 128, splits=8, group=2),
        Tile(128, 128, 128, group=1),
    ],
    ids=str,
)
def test_every_tile_gives_the_product(tile: Tile) -> None:
    """Rows and columns beyond the last whole tile, K beyond the last whole block, splits unused."""
    x, weight = drawn(70, 300, 200)
    found = linear.run_linear(x, weight, torch.float32, tile)
    expected = product(x, weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.std())


def test_rows_of_any_layout() -> None:
    """Scales column by column or row by row, codes that are part of wider rows."""
    x, weight = drawn(5, 256, 64)
    expected = linear.linear_fp8(*x, *weight, torch.float32)
    assert x[1].stride() == (1, 8)
    assert torch.equal(linear.linear_fp8(x[0], x[1].contiguous(), *weight, torch.float32), expected)
    wide = torch.cat((x[0].view(torch.uint8), x[0].view(torch.uint8)), 1).view(x[0].dtype)
    part = wide[:, 256:]
    assert torch.equal(linear.linear_fp8(part, x[1], *weight, torch.float32), expected)


def test_nan_stays_in_its_row() -> None:
    hidden = torch.ones(3, 256)
    hidden[1, 7], hidden[2, 200] = torch.nan, torch.inf
    codes, scales = linear.quantise_rows(hidden, True)
    assert codes.float().isnan().nonzero().tolist() == [[1, 7], [2, 200]]
    assert scales.isfinite().all()
    _, weight = drawn(1, 256, 16)
    out = linear.linear_fp8(codes, scales, *weight, torch.float32)
    assert out.isnan().all(1).tolist() == [False, True, True]


def test_bits_of_a_row_do_not_hang_on_its_neighbours() -> None:
    """The fixed variant: alone, among few, among many, in another place."""
    x, weight = drawn(90, 300, 130)
    whole = linear.linear_fp8_fixed(*x, *weight, torch.bfloat16)
    for rows in (slice(0, 1), slice(60, 67), slice(3, 80)):
        part = linear.linear_fp8_fixed(x[0][rows], x[1][rows], *weight, torch.bfloat16)
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("num_columns", [64, 576, 2112, 7168, 24576, 129280])
def test_splits_leave_each_part_something(num_columns: int) -> None:
    for width in (128, 512, 1536, 7168, 16384):
        for num_rows in (1, 16, 33, 128, 129, 4096):
            tile = tiles.linear_tile(num_rows, num_columns, width)
            assert tile.rows >= min(num_rows, 64)
            assert (tile.splits - 1) * 128 < width


@pytest.mark.parametrize("shape", [(64, 512), (2112, 7168), (7168, 16384), (24576, 1536)])
def test_fixed_tiles_cut_k_in_the_same_parts_for_every_number_of_rows(
    shape: tuple[int, int],
) -> None:
    numbers = (1, 16, 20, 64, 128, 129, 1024, 8192)
    free = [tiles.fixed_linear_tile(number, *shape, are_equal=True) for number in numbers]
    assert len({(tile.splits, tile.depth) for tile in free}) == 1
    assert {tile.rows for tile in free} >= {16, 32, 64}
    bound = {tiles.fixed_linear_tile(number, *shape, are_equal=False) for number in numbers}
    assert {(tile.splits, tile.depth) for tile in bound} == {(free[0].splits, free[0].depth)}
    assert len(bound) == 1
