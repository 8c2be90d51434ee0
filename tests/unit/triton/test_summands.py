"""Sums that are left to the norm that reads them: the same bits as when they are made before."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.ops.values import Summands
from gnomon.attention.providers.triton import linear, moe, tiles
from gnomon.attention.providers.triton.rows_quantise import norm_quantise
from gnomon.attention.providers.triton.tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
BF16 = torch.bfloat16
Codes = tuple[Tensor, Tensor]


def never() -> Tensor:
    raise AssertionError("was added by a launch of its own")


def added(parts: Tensor, ids: Tensor | None) -> Tensor:
    """One by one in fp32, then rounded once."""
    total = torch.zeros(parts.shape[1:])
    for place, part in enumerate(parts):
        kept = part if ids is None else part.where(ids[:, place, None] >= 0, 0)
        total = total + kept.float()
    return total.to(BF16)


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize(
    ("num_parts", "num_rows", "width"), [(1, 3, 256), (9, 5, 384), (2, 1, 200)]
)
def test_a_norm_adds_what_its_residual_is_made_of(
    num_parts: int, num_rows: int, width: int, has_ids: bool
) -> None:
    generator = Generator().manual_seed(num_parts)
    x = torch.randn(num_rows, width, generator=generator).to(BF16)
    weight = torch.randn(width, generator=generator).to(BF16)
    parts = torch.randn(num_rows, num_parts, width, generator=generator)
    parts = (parts.to(BF16) if has_ids else parts).transpose(0, 1)
    ids = torch.randint(-1, 4, (num_rows, num_parts), generator=generator) if has_ids else None
    if ids is not None:
        parts = parts.where(ids.T[:, :, None] >= 0, math.nan)  # never written, never read
    found = norm_quantise(x, Summands(parts, BF16, ids, never), weight, 1e-6, False)
    expected = norm_quantise(x, added(parts, ids), weight, 1e-6, False)
    for one, other in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def weight_of(generator: Generator, *shape: int) -> Codes:
    codes = (torch.randn(shape, generator=generator) * 60).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return codes, torch.rand(grid, generator=generator) * 0.01


def rows_of(generator: Generator, num_rows: int, width: int) -> Codes:
    return linear.quantise_rows(torch.randn(num_rows, width, generator=generator), False)


def test_splits_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator().manual_seed(1)
    x, weight = rows_of(generator, 5, 512), weight_of(generator, 200, 512)
    for splits in (3, 1):
        tile = Tile(16, 64, 128, splits=splits)
        monkeypatch.setattr(tiles, "linear_tile", lambda *_, tile=tile: tile)
        found = linear.linear_fp8_parts(*x, *weight, BF16)
        expected = linear.linear_fp8(*x, *weight, BF16)
        if splits == 1:
            assert isinstance(found, Tensor)
            assert torch.equal(found, expected)
            continue
        assert isinstance(found, Summands)
        assert found.parts.shape == (3, 5, 200)
        assert torch.equal(found.total(), expected)
        assert torch.equal(added(found.parts, found.ids), expected)


def test_splits_with_fixed_bits() -> None:
    generator = Generator().manual_seed(4)
    x, weight = rows_of(generator, 2, 3072), weight_of(generator, 130, 3072)
    found = linear.linear_fp8_parts_fixed(*x, *weight, BF16)
    assert isinstance(found, Summands)
    assert torch.equal(found.total(), linear.linear_fp8_fixed(*x, *weight, BF16))


@pytest.mark.parametrize("kind", ["", "_fixed"])
def test_shares_of_experts(kind: str) -> None:
    generator = Generator().manual_seed(2)
    x = rows_of(generator, 6, 128)
    gate_up, down = weight_of(generator, 4, 256, 128), weight_of(generator, 4, 160, 128)
    ids = torch.tensor([[0, 1, 2], [3, -1, 0], [-1, -1, -1], [2, 1, 3], [0, 3, -1], [1, 2, 0]])
    shares = torch.rand(6, 3, generator=generator)
    given = (x, ids, shares, gate_up, down, False, BF16)
    found, expected = (getattr(moe, name + kind)(*given) for name in ("moe_fp8_parts", "moe_fp8"))
    assert isinstance(found, Summands)
    assert found.parts.shape == (3, 6, 160)
    assert torch.equal(found.total(), expected)
    assert found.ids is not None
    assert torch.equal(added(found.parts, found.ids), expected)


def test_no_rows_are_nothing_to_add() -> None:
    generator = Generator().manual_seed(3)
    x, weight = rows_of(generator, 0, 512), weight_of(generator, 128, 512)
    assert torch.equal(linear.linear_fp8_parts(*x, *weight, BF16), torch.empty(0, 128, dtype=BF16))
    gate_up, down = weight_of(generator, 4, 256, 128), weight_of(generator, 4, 160, 128)
    ids, shares = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
    x = rows_of(generator, 0, 128)
    found = moe.moe_fp8_parts(x, ids, shares, gate_up, down, False, BF16)
    assert isinstance(found, Tensor)
    assert found.shape == (0, 160)
