"""The margin rule on traces made by hand: what is equal, what is a tie, what is a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.verify.margins import Kind, Tolerances, compare, smallest_gap, token_margin
from tests.unit.verify.traces import (
    plain_trace,
    with_experts,
    with_key_margin,
    with_keys,
    with_logit,
)

RULE = Tolerances(logits=1e-4, tie=1e-5)


def test_equal_runs() -> None:
    found = compare(plain_trace(), plain_trace(), RULE)
    assert found.divergences == ()
    assert found.worst == 0.0
    assert found.num_choices == 6 * 3


def test_a_small_logit_difference_is_measured() -> None:
    found = compare(plain_trace(), with_logit(plain_trace(), 2, 0, 5e-5), RULE)
    assert found.divergences == ()
    assert found.worst == pytest.approx(5e-5, rel=1e-2)


def test_a_large_logit_difference_is_a_fault() -> None:
    (fault,) = compare(plain_trace(), with_logit(plain_trace(), 2, 0, 1e-3), RULE).faults
    assert (fault.kind, fault.position) == (Kind.LOGITS, 2)
    assert fault.size == pytest.approx(1e-3, rel=1e-2)
    assert "position 2" in str(fault)


def test_the_tolerance_grows_with_the_logits() -> None:
    big = replace(plain_trace(), logits=plain_trace().logits * 100)
    assert compare(big, with_logit(big, 2, 0, 5e-3), RULE).divergences == ()
    assert compare(big, with_logit(big, 2, 0, 5e-1), RULE).faults


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_faults(value: float) -> None:
    assert compare(plain_trace(), with_logit(plain_trace(), 1, 1, value), RULE).faults


def test_rows_that_were_not_computed_do_not_count() -> None:
    cold = with_logit(plain_trace(), 1, 1, float("nan"))
    is_computed = torch.tensor([False, False, True, True, True, True])
    found = compare(plain_trace(), replace(cold, is_computed=is_computed), RULE)
    assert found.divergences == ()
    assert found.num_choices == 4 * 3


def test_keys_at_a_wide_margin_are_a_fault() -> None:
    (fault,) = compare(plain_trace(), with_keys(plain_trace(), 0, 4, [1, 3, 4]), RULE).faults
    assert (fault.kind, fault.position, fault.layer) == (Kind.KEYS, 4, 0)
    assert fault.margin == 0.5


def test_keys_at_a_narrow_margin_are_a_tie_that_excuses_what_follows() -> None:
    expected = with_key_margin(plain_trace(), 0, 4, 5e-6)
    found = with_keys(expected, 0, 4, [1, 3, 4])
    found = with_logit(with_keys(found, 2, 5, [1, 2, 5]), 4, 2, 3.0)
    compared = compare(expected, found, RULE)
    assert compared.is_tie
    assert not compared.is_token_tie
    assert compared.num_choice_ties == 1
    (tie,) = compared.divergences
    assert tie.margin == 5e-6


def test_a_tie_excuses_no_earlier_row() -> None:
    expected = with_key_margin(plain_trace(), 0, 4, 5e-6)
    found = with_logit(with_keys(expected, 0, 4, [1, 3, 4]), 3, 2, 3.0)
    assert compare(expected, found, RULE).faults


def test_the_margin_of_either_side_counts() -> None:
    """Where only gnomon tells margins, as against transformers, these decide."""
    ours = with_key_margin(plain_trace(), 0, 4, 5e-6)
    theirs = replace(with_keys(ours, 0, 4, [1, 3, 4]), key_margin={}, expert_margin={})
    assert compare(theirs, ours, RULE).is_tie
    assert compare(ours, theirs, RULE).is_tie


def test_no_margin_at_all_is_a_fault() -> None:
    bare = replace(plain_trace(), key_margin={}, expert_margin={})
    assert compare(bare, with_keys(bare, 0, 4, [1, 3, 4]), RULE).faults


def test_a_tie_does_not_excuse_another_root() -> None:
    """Layer 0 at position 5 hears nothing of layer 2 at position 4: it is a root of its own."""
    expected = with_key_margin(plain_trace(), 2, 4, 5e-6)
    found = with_keys(with_keys(expected, 2, 4, [1, 3, 4]), 0, 5, [1, 4, 5])
    (fault,) = compare(expected, found, RULE).faults
    assert (fault.position, fault.layer) == (5, 0)


def test_a_later_layer_of_a_later_row_may_follow() -> None:
    expected = with_key_margin(plain_trace(), 0, 4, 5e-6)
    found = with_keys(with_keys(expected, 0, 4, [1, 3, 4]), 2, 5, [1, 4, 5])
    assert compare(expected, found, RULE).is_tie


def test_the_same_layer_of_a_later_row_does_not_follow() -> None:
    """Keys of layer 0 are written before any choice of layer 0: position 5 cannot hear of 4."""
    expected = with_key_margin(plain_trace(), 0, 4, 5e-6)
    found = with_keys(with_keys(expected, 0, 4, [1, 3, 4]), 0, 5, [1, 4, 5])
    (fault,) = compare(expected, found, RULE).faults
    assert (fault.position, fault.layer) == (5, 0)


def test_an_earlier_position_does_not_follow() -> None:
    expected = with_key_margin(plain_trace(), 0, 5, 5e-6)
    found = with_keys(with_keys(expected, 0, 5, [1, 4, 5]), 2, 4, [1, 3, 4])
    (fault,) = compare(expected, found, RULE).faults
    assert (fault.position, fault.layer) == (4, 2)


def test_experts_of_the_same_row_follow_its_keys() -> None:
    expected = with_key_margin(plain_trace(), 0, 4, 5e-6)
    found = with_experts(with_keys(expected, 0, 4, [1, 3, 4]), 4, [1, 3])
    assert compare(expected, found, RULE).is_tie


def test_experts_alone_are_a_root() -> None:
    (fault,) = compare(plain_trace(), with_experts(plain_trace(), 2, [1, 3]), RULE).faults
    assert (fault.kind, fault.layer, fault.margin) == (Kind.EXPERTS, 1, 0.25)


def test_lists_of_other_widths_are_compared_as_sets() -> None:
    trace = plain_trace()
    wide = {layer: torch.nn.functional.pad(k, (0, 2), value=-1) for layer, k in trace.keys.items()}
    assert compare(trace, replace(trace, keys=wide), RULE).divergences == ()


def test_another_token_at_a_wide_gap_is_a_fault_and_ends_the_comparison() -> None:
    expected = plain_trace()
    tokens = (*expected.tokens[:5], 0, 0)
    found = with_logit(replace(expected, tokens=tokens), 5, 0, 3.0)
    (fault,) = compare(expected, found, RULE).faults
    assert (fault.kind, fault.position) == (Kind.TOKEN, 4)
    assert fault.margin == pytest.approx(token_margin(expected, 4))


def test_another_token_at_a_narrow_gap_is_a_tie() -> None:
    expected = plain_trace()
    best = expected.tokens[5]
    expected = with_logit(expected, 4, 0, float(expected.logits[4, best] - expected.logits[4, 0]))
    expected = with_logit(expected, 4, 0, -4e-6)
    found = replace(expected, tokens=(*expected.tokens[:5], 0, 0))
    compared = compare(expected, found, RULE)
    assert compared.is_token_tie
    assert compared.num_choice_ties == 0


def test_a_token_behind_a_tied_choice_is_a_token_tie() -> None:
    expected = with_key_margin(plain_trace(), 0, 4, 5e-6)
    found = with_keys(expected, 0, 4, [1, 3, 4])
    found = replace(found, tokens=(*expected.tokens[:5], 0, 0))
    assert compare(expected, found, RULE).is_token_tie


def test_a_drawn_token_has_no_greedy_margin() -> None:
    expected = replace(plain_trace(), tokens=(*plain_trace().tokens[:5], 0, 0))
    assert token_margin(expected, 4) == float("inf")
    assert compare(expected, plain_trace(), RULE).faults


def test_the_shorter_run_ends_the_comparison() -> None:
    short = replace(plain_trace(), tokens=plain_trace().tokens[:4])
    assert compare(plain_trace(), short, RULE).num_choices == 4 * 3


def test_smallest_gap_looks_at_everything_before() -> None:
    trace = with_key_margin(plain_trace(), 2, 3, 0.125)
    assert smallest_gap((trace, trace), 2) == 0.25
    assert smallest_gap((trace, trace), 5) == 0.125
