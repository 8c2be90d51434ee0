"""Experts of the triton provider under the interpreter: sorting, the specs, tiles, fixed bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.providers import reference
from gnomon.attention.providers.triton import moe, moe_sort, tiles
from gnomon.attention.providers.triton.tiles import MoeTiles, Tile, moe_tiles
from gnomon.attention.spec import SPECS, Scale, check_provider

# The interpreter turns run-time bounds of a range, arrays of one number, into ints.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAST = KernelSet("triton", 20, moe.KERNELS)
FIXED = KernelSet("triton fixed", 20, moe.FIXED)
SMALL = Scale(num_rows=7, hidden_size=144, num_experts=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["moe", "moe_fp8"])
def test_cases_of_the_specs(op: str, dtype: torch.dtype) -> None:
    """All of them for plain weights; of FP8, whose experts are wide, every other one."""
    cases = list(SPECS[op].cases(Generator().manual_seed(1), dtype, SMALL))
    for number, case in enumerate(cases if op == "moe" else cases[::2]):
        result = check_provider(SPECS[op], FIXED if number % 3 == 1 else FAST, case, dtype)
        assert result.is_ok, result


def sorted_by_hand(ids: Tensor, num_experts: int, block: int) -> tuple[list[int], list[int]]:
    """(pairs, expert of each block)."""
    flat, pairs, experts = ids.flatten().tolist(), [], []
    for expert in range(num_experts):
        mine = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        num_blocks = -(-len(mine) // block)
        pairs += mine + [len(flat)] * (num_blocks * block - len(mine))
        experts += [expert] * num_blocks
    return pairs, experts


@given(
    num_rows=st.integers(1, 40),
    num_experts=st.integers(1, 33),
    block=st.sampled_from([16, 64]),
    holes=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_pairs_are_sorted(
    num_rows: int, num_experts: int, block: int, holes: float, seed: int
) -> None:
    generator = Generator().manual_seed(seed)
    k = min(num_experts, 3)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :k]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < holes, -1)
    check_sorted(ids, num_experts, block)


def check_sorted(ids: Tensor, num_experts: int, block: int) -> None:
    blocks = moe_sort.sort_by_expert(ids, num_experts, block)
    pairs, experts = sorted_by_hand(ids, num_experts, block)
    used = int(blocks.num_blocks)
    assert used == len(experts) <= blocks.most
    assert blocks.expert[:used].tolist() == experts
    assert blocks.pairs[: used * block].tolist() == pairs


def test_many_pairs_are_sorted_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches, chunks that end inside, experts that nobody names."""
    monkeypatch.setattr(moe_sort, "FEW_PAIRS", 0)
    generator = Generator().manual_seed(0)
    for num_rows, k, num_experts in ((1, 2, 6), (700, 3, 40), (257, 8, 9)):
        ids = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :k]
        ids = ids.masked_fill((ids % 7 == 3) | (torch.rand(ids.shape) < 0.1), -1)
        check_sorted(ids, num_experts, 16)


def fp8_case(num_rows: int) -> tuple[tuple[Tensor, ...], ...]:
    spec, scale = SPECS["moe_fp8"], Scale(num_rows=num_rows, hidden_size=144, num_experts=4)
    case = next(iter(spec.cases(Generator().manual_seed(4), torch.float32, scale)))
    x, ids, weights, gate_up, down, *_ = case.arguments
    return x, (ids, weights), (gate_up, down)


@pytest.mark.parametrize(
    "chosen",
    [
        MoeTiles(Tile(16, 128, 128), Tile(16, 64, 128)),
        MoeTiles(Tile(64, 128, 128, group=1), Tile(64, 128, 128)),
        MoeTiles(Tile(64, 128, 128), Tile(16, 64, 128)),  # several tiles a block
        MoeTiles(Tile(64, 128, 128, swap_below=128), Tile(32, 64, 128, group=2)),
        MoeTiles(Tile(16, 32, 128), Tile(16, 128, 128), is_split=True),
    ],
    ids=["narrow", "wide", "several a block", "swapped", "gate and up apart"],
)
def test_every_tile_gives_the_same_mixture(chosen: MoeTiles) -> None:
    x, pairs, weights = fp8_case(20)
    kind = (True, torch.float32)
    found = moe.run_moe_fp8(x, pairs, weights, kind, chosen)
    expected = reference.moe_fp8(x, *pairs, *weights, True, torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=2e-2)


def test_bits_of_a_row_do_not_hang_on_its_neighbours() -> None:
    """The fixed variants; the plain one in half precision."""
    x, (ids, weights), (gate_up, down) = fp8_case(40)
    whole = moe.moe_fp8_fixed(x, ids, weights, gate_up, down, False, torch.bfloat16)
    for rows in (slice(0, 1), slice(30, 37)):
        part = (x[0][rows], x[1][rows]), ids[rows], weights[rows]
        found = moe.moe_fp8_fixed(*part, gate_up, down, False, torch.bfloat16)
        assert torch.equal(found, whole[rows])
    case = next(iter(SPECS["moe"].cases(Generator().manual_seed(4), torch.bfloat16, Scale(70))))
    x, ids, weights, *experts = case.arguments
    whole = moe.moe_fixed(x, ids, weights, *experts)
    for rows in (slice(0, 1), slice(30, 67)):
        assert torch.equal(moe.moe_fixed(x[rows], ids[rows], weights[rows], *experts), whole[rows])


def test_nan_of_a_row_that_no_expert_gets_goes_nowhere() -> None:
    case = next(iter(SPECS["moe"].cases(Generator().manual_seed(4), torch.float32, Scale(6))))
    x, ids, weights, *experts = case.arguments
    clean = moe.moe(x, ids.index_fill(0, torch.tensor([2]), -1), weights, *experts)
    x[2], ids[2] = torch.nan, -1
    found = moe.moe(x, ids, weights, *experts)
    assert torch.equal(found, clean)
    assert not found[2].any()


def test_tiles_hold_a_group_where_hidden_values_are_quantised() -> None:
    for num_experts, hidden, width in ((32, 7168, 2048), (256, 7168, 256), (32, 6144, 2048)):
        down = torch.empty(num_experts, hidden, width, dtype=torch.uint8, device="meta")
        for num_pairs in (8, 128, 512, 1152, 1728, 65536, 131072):
            chosen = moe_tiles(num_pairs, down, is_fp8=True)
            assert chosen.is_split or chosen.fused.columns == 128
            assert chosen.fused.rows % chosen.down.rows == 0
            # Rows of one GPU of expert-parallel 8: 128 are 36 an expert, few of them more than 45.
            if (num_experts, num_pairs) in ((32, 1152), (32, 1728)):
                assert chosen.fused.rows == 64
                assert chosen.down.rows == (32 if num_pairs == 1152 else 64)


@pytest.mark.parametrize("kind", [tiles.Kind.NEWER, tiles.Kind.OLDER])
def test_tiles_of_other_devices_are_smaller(kind: tiles.Kind) -> None:
    for is_fp8, dtype in ((True, torch.uint8), (False, torch.bfloat16)):
        down = torch.empty(33, 7168, 2048, dtype=dtype, device="meta")
        most = 32 if is_fp8 and kind is tiles.Kind.OLDER else 64
        for number in (8, 128, 600, 1152, 65536):
            free = moe_tiles(number, down, is_fp8, kind)
            fixed = tiles.fixed_moe_tiles(number, down, is_fp8, False, kind)
            for pair in (free, fixed):
                assert pair.down.rows <= pair.fused.rows <= most
                assert max(pair.fused.stages, pair.down.stages) <= 3 or pair.fused.columns == 32
            assert fixed.fused.rows == fixed.down.rows == most


def test_fixed_tiles_differ_where_their_bits_are_equal_only() -> None:
    numbers = (8, 128, 600, 1152, 65536)
    for is_fp8, dtype in ((True, torch.uint8), (False, torch.bfloat16)):
        down = torch.empty(33, 7168, 2048, dtype=dtype, device="meta")
        free = [tiles.fixed_moe_tiles(number, down, is_fp8, True) for number in numbers]
        assert {chosen.fused.rows for chosen in free} == {16, 32, 64, 128}
        assert len({(chosen.fused.depth, chosen.down.depth) for chosen in free}) == 1
        assert not any(chosen.is_split for chosen in free)
        bound = {tiles.fixed_moe_tiles(number, down, is_fp8, False) for number in numbers}
        assert {(c.fused.rows, c.down.rows, c.fused.depth) for c in bound} == {
            (64, 64, free[0].fused.depth)
        }
        assert len(bound) == 1
    assert not tiles.has_equal_tiles(torch.device("cpu"), torch.bfloat16)
