"""What passes over the tape; the rule for codes: a step apart, and no more than errors flip."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import build_geometry
from gnomon.attention.layouts import Fp8LatentLayout, PlainLayout
from gnomon.errors import GnomonError, NumericsError
from gnomon.verify.cached_values import (
    LATENTS,
    CacheTape,
    PartValues,
    TapeOfRanks,
    code_fault,
    rounds,
)

LAYOUT = Fp8LatentLayout(64, 16).computing_in(torch.float32)
HALF = PlainLayout(torch.bfloat16, 80).computing_in(torch.float32)
PART = (LATENTS, 2)
TOLERANCE = 3e-5


def values(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, 80, generator=torch.Generator().manual_seed(seed))


def decoded(layout: Fp8LatentLayout | PlainLayout, raw: Tensor) -> PartValues:
    return PartValues(layout, layout.dequantise(layout.quantise(raw)))


def fault(ours: Tensor, theirs: Tensor, layout: Fp8LatentLayout | PlainLayout = LAYOUT) -> str:
    mask = torch.ones(len(ours), dtype=torch.bool)
    found = code_fault(decoded(layout, ours), decoded(layout, theirs), mask, TOLERANCE)
    return "" if found is None else f"{found[0]}: {found[1]}"


@pytest.mark.parametrize("layout", [LAYOUT, HALF])
def test_values_that_differ_by_rounding_are_no_fault(layout: Fp8LatentLayout) -> None:
    raw = values(400)
    error = 1e-6 * values(400, seed=1)
    assert bool((decoded(layout, raw).values != decoded(layout, raw + error).values).any())
    assert fault(raw, raw + error, layout) == ""
    assert fault(raw, raw, layout) == ""


@pytest.mark.parametrize("layout", [LAYOUT, HALF])
def test_a_small_factor_flips_too_many(layout: Fp8LatentLayout) -> None:
    raw = values(400)
    assert "codes are one step off, not" in fault(raw, raw * 1.002, layout)


def test_a_wrong_value_is_far_off_and_found_where_it_is() -> None:
    raw = values(40)
    wrong = raw.clone()
    wrong[17, 3] += 0.7
    assert fault(raw, wrong).startswith("17: a code is ")


def test_a_doubled_scale_is_found() -> None:
    raw = values(40)
    assert "steps off" in fault(raw, 2 * raw)


def test_rows_that_one_side_has_not_seen_are_left_out() -> None:
    ours, theirs = decoded(LAYOUT, values(9)), decoded(LAYOUT, values(9, seed=2))
    theirs.values[:5] = torch.nan
    mask = torch.tensor([True] * 5 + [False] * 4)
    assert code_fault(ours, theirs, mask, TOLERANCE) is None
    assert code_fault(ours, theirs, ~mask, TOLERANCE) is not None


def test_which_layouts_round() -> None:
    assert rounds(LAYOUT, torch.bfloat16)
    assert rounds(HALF, torch.float32)
    assert not rounds(HALF, torch.bfloat16)
    assert not rounds(PlainLayout(torch.float32, 80), torch.float32)


def test_tape_keeps_by_request_and_position_and_replaces_what_is_known() -> None:
    """Two requests in one step; of one of them positions 3 and 4 are known."""
    geometry = build_geometry([2, 3], [5, 3], {"tokens": [[1, 2], [3]]}, 4, label="step")
    own = values(5)
    given = PartValues(LAYOUT, torch.full((4, 80), torch.nan))
    given.values[3] = 7.0
    tape = CacheTape()
    tape.restart({"a": {PART: given}})
    tape.begin_step(["a", "b"])
    passed = tape.pass_on(PART, geometry.rows, LAYOUT, own)
    assert bool((passed[0] == 7.0).all())  # position 3 of "a"
    assert torch.equal(passed[1:], own[1:])
    kept = tape.of("a", 5)[PART].values
    assert torch.equal(kept[3:], own[:2])  # its own, not what stands in their place
    assert bool(kept[:3].isnan().all())
    assert torch.equal(tape.of("b", 3)[PART].values, own[2:])
    assert tape.of("c", 3) == {}


def test_a_tape_that_nobody_told_the_requests_says_so() -> None:
    geometry = build_geometry([1], [1], {"tokens": [[1]]}, 4, label="step")
    with pytest.raises(GnomonError, match="before a step told its requests"):
        CacheTape().pass_on(PART, geometry.rows, LAYOUT, values(1))


def test_ranks_that_hold_different_values_are_found() -> None:
    geometry = build_geometry([3], [3], {"tokens": [[1]]}, 4, label="step")
    tapes = (CacheTape(), CacheTape())
    both = TapeOfRanks(tapes)
    for seeds in ((0, 0), (0, 1)):
        both.restart({})
        both.begin_step(["a"])
        for tape, seed in zip(tapes, seeds, strict=True):
            tape.pass_on(PART, geometry.rows, LAYOUT, values(3, seed))
        if seeds == (0, 0):
            assert torch.equal(both.of("a", 3)[PART].values, values(3))
        else:
            with pytest.raises(NumericsError, match="rank 1 and an earlier one hold different"):
                both.of("a", 3)
