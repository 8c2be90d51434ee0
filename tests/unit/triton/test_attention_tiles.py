"""Tiles and splits: pure functions of shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.providers.triton.attention_dense import cut
from gnomon.attention.providers.triton.attention_tiles import (
    SPLIT_CHOICES,
    ListTile,
    choose_splits,
    choose_tile,
)

TILE = ListTile(64, 64, 8, 2)


@given(st.integers(1, 10_000), st.integers(0, 4096), st.integers(1, 160))
def test_a_split_is_never_empty_of_turns(programs: int, width: int, processors: int) -> None:
    splits = choose_splits(programs, width, TILE, processors)
    assert splits in SPLIT_CHOICES
    assert splits <= max(1, -(-width // TILE.keys))


def test_splits_fill_an_idle_device_and_leave_a_busy_one_alone() -> None:
    chosen = [choose_splits(n, 2048, TILE, 132) for n in (1, 16, 64, 128, 4096)]
    assert chosen[0] == 32
    assert chosen[1] == 8
    assert chosen[2:] == [2, 1, 1]
    assert choose_splits(1, 64, TILE, 132) == 1


@pytest.mark.parametrize(
    ("num_heads", "num_rows", "splits"),
    [
        (16, 1, 32),
        (16, 16, 16),
        (16, 64, 4),
        (16, 128, 2),
        (64, 16, 8),
        (128, 16, 4),
        (128, 128, 1),
    ],
)
def test_splits_of_packed_lists_are_those_measured_fastest(
    num_heads: int, num_rows: int, splits: int
) -> None:
    tile = choose_tile(num_heads, 512, torch.bfloat16, True, num_rows)
    programs = num_rows * -(-num_heads // tile.heads)
    assert choose_splits(programs, 2048, tile, 132) == splits


@given(st.integers(1, 256), st.sampled_from([16, 64, 512, 1024]), st.booleans())
def test_few_heads_do_not_pay_for_many(heads: int, width: int, is_packed: bool) -> None:
    tile = choose_tile(heads, width, torch.bfloat16, is_packed)
    assert 16 <= tile.heads <= (16 if heads <= 16 else 64)
    assert tile.heads * width <= 64 * 512
    assert choose_tile(heads, width, torch.bfloat16, is_packed, num_rows=4096) == tile


@pytest.mark.parametrize(
    ("width", "is_packed", "parts"),
    [
        (512, False, 4),
        (64, False, 4),
        (48, False, 1),
        (32, False, 1),
        (192, False, 1),
        (512, True, 1),
    ],
)
def test_plain_latents_of_few_heads_come_in_parts_of_whole_blocks(
    width: int, is_packed: bool, parts: int
) -> None:
    assert choose_tile(16, width, torch.bfloat16, is_packed, 4096).parts == parts
    assert choose_tile(64, width, torch.bfloat16, is_packed, 4096).parts == 1


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (192, (128, 64)),
        (128, (128, 0)),
        (24, (32, 0)),
        (48, (32, 16)),
        (112, (128, 0)),
        (8, (16, 0)),
    ],
)
def test_a_head_is_cut_into_powers_of_two(width: int, parts: tuple[int, int]) -> None:
    assert cut(width) == parts
