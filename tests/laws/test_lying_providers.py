"""Providers that lie, one lie each: checked mode names operator, provider, row, request and rule.

The oracle is the lie itself (tests/unit/checked/lies.py): each kernel is torch's with one stated
thing wrong in a stated row; the same bench without the lie runs clean (test_checked.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gnomon.attention.checked import CheckLevel
from gnomon.attention.checks.faults import Rule
from gnomon.errors import NumericsError
from tests.unit.checked import lies
from tests.unit.checked.lies import BOTH, LIES, Lie
from tests.unit.checked.steps import NAMES, Bench

CASES = [pytest.param(lie, level, id=f"{lie}-{level}") for lie in LIES for level in lie.levels]


@pytest.mark.parametrize(("lie", "level"), CASES)
def test_a_lying_provider_is_named(lie: Lie, level: CheckLevel) -> None:
    bench = Bench({lie.kernel_of: lie.kernel}, level)
    with pytest.raises(NumericsError) as caught:
        bench.run_a_round(lie.op)
    text = str(caught.value)
    assert text.startswith(f"{lie.kernel_of} of provider 'liar' in layer 0"), text
    assert f"breaks '{lie.rule}'" in text
    assert lie.says in text
    if lie.row is not None:
        assert f", row {lie.row} " in text
    if lie.request is not None:
        assert f"(request {lie.request!r}, position " in text
    assert bench.checker.num_violations == 1


def test_a_hidden_nan_is_named() -> None:
    """The flag of a row is part of top-k's contract: without it the engine would go on."""
    bench = Bench({"topk": lies.no_flag}, isolates=True)
    bench.step.index_keys.typed()[:] = math.nan
    bench.run("index_select")
    found = {violation.request: violation for violation in bench.checker.violations()}
    assert found["c"].rule is Rule.FINITE  # the score itself, before top-k had a chance to lie
    scores = torch.randn(4, 20)
    scores[2, 3] = math.nan
    lone = Bench({"topk": lies.no_flag})
    with pytest.raises(NumericsError, match=Rule.FLAG):
        lone.ops.kernels["topk"](scores, torch.full((4,), 20, dtype=torch.int32), 8, True)


@pytest.mark.parametrize("level", BOTH)
def test_only_the_request_of_a_bad_row_is_at_fault(level: CheckLevel) -> None:
    bench = Bench({"topk": lies.swapped_ids}, level, isolates=True)
    bench.run("index_select")
    (violation,) = bench.checker.violations()
    assert (violation.request, violation.row, violation.op) == ("c", 8, "topk")
    bench = Bench({"sparse_mla": lies.binary_lse}, level, isolates=True)
    bench.run("sparse_mla")
    assert {violation.request for violation in bench.checker.violations()} <= set(NAMES)
    bench = Bench({"sparse_mla": lies.padding_not_zero}, level, isolates=True)
    bench.run("sparse_mla")
    assert [violation.request for violation in bench.checker.violations()] == [None]


@pytest.mark.parametrize("kernel", [lies.extra_row, lies.past_its_rows])
def test_harm_beyond_a_request_is_never_kept(kernel: Callable[..., Any]) -> None:
    bench = Bench({"sparse_mla": kernel}, isolates=True)
    with pytest.raises(NumericsError):
        bench.run("sparse_mla")
