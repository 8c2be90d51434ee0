"""Comparison: the allowance written out by hand, rows and heads, formats of the cache."""

from __future__ import annotations

import math

import pytest
import torch

from gnomon.attention.layouts import Fp8LatentLayout, PlainLayout
from gnomon.attention.recording import PoolPart, RecordedCall
from gnomon.attention.recording_calls import WRITTEN
from gnomon.attention.recording_compare import compare_results, compute_dtype, tolerance_of
from gnomon.attention.spec import SPECS


def attention_call(dtype=torch.float32):
    return RecordedCall("sparse_mla", 3, arguments=(torch.zeros(4, 2, 8, dtype=dtype),))


def compared(found, expected, call=None, name="out"):
    return compare_results(call or attention_call(), {name: found}, {name: expected})


def test_the_allowance_is_twice_the_specs_tolerance():
    """UNIT_SUM: 1e-5 + 1e-5 * |expected|, for rows of unit size."""
    spec = SPECS["sparse_mla"].tolerances[torch.float32]
    expected = torch.full((4, 2, 8), 0.5, dtype=torch.float64)
    allowed = 2 * (spec.absolute + spec.relative * 0.5)
    for share, is_ok in ((0.99, True), (1.01, False), (-0.99, True), (-1.01, False)):
        found = expected.clone()
        found[2, 1, 3] += share * allowed
        result = compared(found, expected)
        assert result.is_ok is is_ok
        assert result.share == pytest.approx(abs(share), rel=1e-6)
        assert result.worst == pytest.approx(abs(share) * allowed, rel=1e-6)
        assert not result.is_equal


def test_the_absolute_part_grows_with_a_rows_largest_number_alone():
    spec = SPECS["sparse_mla"].tolerances[torch.float32]
    expected = torch.zeros(4, 2, 8, dtype=torch.float64)
    expected[1, 0, 0] = 100.0  # row 1 is large, row 2 is not
    for row, size in ((1, 100.0), (2, 1.0)):
        for share, is_ok in ((0.99, True), (1.01, False)):
            found = expected.clone()
            found[row, 1, 3] += share * 2 * spec.absolute * size
            assert compared(found, expected).is_ok is is_ok


def test_exact_results_allow_nothing():
    call = RecordedCall("topk", 0, arguments=(torch.zeros(3, 4),))
    ids = torch.tensor([[0, 2, 5], [1, 2, 3], [4, 5, -1]], dtype=torch.int32)
    wrong = ids.clone()
    wrong[1, 2] = 4
    result = compare_results(call, {"ids": wrong}, {"ids": ids})
    assert math.isinf(result.share)
    first = result.first
    assert (first.row, first.index, first.head) == (1, (1, 2), None)
    assert (first.expected, first.found, first.allowed) == (3.0, 4.0, 0.0)


def test_the_first_wrong_row_is_named_even_if_a_later_one_is_worse():
    expected = torch.zeros(4, 2, 8)
    found = expected.clone()
    found[1, 1, 6], found[1, 0, 2], found[3, 0, 0] = 0.5, 0.2, 9.0
    result = compared(found, expected)
    assert (result.first.row, result.first.head, result.first.index) == (1, 1, (1, 1, 6))
    assert result.worst == 9.0


def test_rows_of_the_step_are_looked_up():
    call = RecordedCall(
        "sparse_mla", 3, arguments=(torch.zeros(2, 2, 8),), rows={"R": torch.tensor([9, 17])}
    )
    expected = torch.zeros(2, 2)
    found = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    first = compare_results(call, {"lse": found}, {"lse": expected}).first
    assert (first.name, first.row, first.step_row, first.head) == ("lse", 1, 17, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_numbers(value):
    expected = torch.zeros(4, 2, 8)
    special = expected.clone()
    special[0, 0, 0] = value
    assert compared(special, special.clone()).is_equal
    assert compared(special, special + 0.0).is_ok
    assert math.isinf(compared(special, expected).share)
    assert math.isinf(compared(expected, special).share)


def test_missing_misshapen_and_retyped_results():
    expected = torch.zeros(4, 2, 8)
    result = compare_results(attention_call(), {}, {"out": expected})
    assert result.first.note == "is missing"
    assert "float32 [4, 2, 7], recorded" in compared(expected[..., 1:], expected).first.note
    assert "torch.float64" in compared(expected.double(), expected).first.note
    assert compared(expected[:0], expected[:0]).is_equal


def written_call(layout):
    slots = torch.arange(4, 10)
    entries = torch.zeros(6, layout.bytes_per_token, dtype=torch.uint8)
    part = PoolPart(layout, 4, torch.arange(3), slots, entries)
    raw = torch.zeros(6, layout.dim)
    return RecordedCall("latent_write", 0, arguments=(raw, None, 1e-6, None, part, slots))


@pytest.mark.parametrize(
    "layout",
    [PlainLayout(torch.bfloat16, 144, torch.float32), Fp8LatentLayout(128, 16, False)],
    ids=lambda layout: layout.id,
)
def test_cache_entries_may_differ_by_a_step_of_their_format(layout):
    """Neighbours of a format come of values that differ by nothing to speak of."""
    layout = layout.computing_in(torch.float32)
    call = written_call(layout)
    values = torch.randn(6, 144, generator=torch.Generator().manual_seed(1))
    expected = layout.quantise(values)
    nudged = layout.quantise(values * (1 + 1e-6))
    assert compared(expected, expected.clone(), call, WRITTEN).is_equal
    assert compared(nudged, expected, call, WRITTEN).is_ok
    first = compared(layout.quantise(values * 1.5), expected, call, WRITTEN).first
    assert (first.row, first.head) == (0, None)
    other = expected.clone()
    other[3] = layout.quantise(values[:1])[0]
    assert compared(other, expected, call, WRITTEN).first.row == 3


def test_the_dtype_of_a_call_is_that_of_its_first_float():
    assert compute_dtype(attention_call(torch.bfloat16)) == torch.bfloat16
    ids = torch.zeros(3, dtype=torch.int32)
    assert compute_dtype(RecordedCall("topk", 0, arguments=(ids, 4))) == torch.float32
    half = tolerance_of(attention_call(torch.bfloat16), "out")
    assert half is SPECS["sparse_mla"].tolerances[torch.bfloat16]
