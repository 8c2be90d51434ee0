"""The router's choice in one launch, under the interpreter, against the torch path and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.ops.routing import RouterRule, Routing
from gnomon.attention.ops.routing import route as route_in_torch
from gnomon.attention.providers.triton.route import route_experts

RULES = [
    (256, RouterRule(8, 8, 4, True, 2.5)),
    (256, RouterRule(8, 1, 1, True, 2.5)),
    (6, RouterRule(2, 1, 1, False, 1.0)),
    (12, RouterRule(3, 4, 2, True, 1.0)),
    (4, RouterRule(4, 2, 2, True, 1.0)),
    (12, RouterRule(3, 4, 2, True, 2.5, shared_expert=12)),
    (32, RouterRule(8, 8, 4, True, 2.5, shared_expert=32)),
]


def given(num_rows: int, num_experts: int) -> tuple[Tensor, Tensor]:
    generator = Generator().manual_seed(1)
    logits = torch.randn(num_rows, num_experts + 3, generator=generator)[:, :num_experts]
    return logits, torch.randn(num_experts, generator=generator) * 0.3


def same(found: Routing, expected: Routing) -> None:
    assert torch.equal(found.expert_ids, expected.expert_ids)
    live = expected.expert_ids >= 0
    torch.testing.assert_close(found.weights[live], expected.weights[live])
    assert not found.weights[~live].any()
    assert (found.margin is None) == (expected.margin is None)
    if found.margin is not None:
        torch.testing.assert_close(found.margin, expected.margin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_experts", "rule"), RULES)
@pytest.mark.parametrize("want_margin", [False, True])
@pytest.mark.parametrize("num_rows", [0, 5])
def test_as_the_torch_path(
    num_rows: int, want_margin: bool, num_experts: int, rule: RouterRule
) -> None:
    logits, bias = given(num_rows, num_experts)
    expected = route_in_torch(logits, bias, None, rule, want_margin)
    same(route_experts(logits, bias, None, rule, want_margin), expected)


def test_padding_rows_go_nowhere() -> None:
    logits, bias = given(4, 12)
    logits[1] = math.nan
    request = torch.tensor([0, -1, 2, -1], dtype=torch.int32)
    rule = RULES[3][1]
    found = route_experts(logits, bias, request, rule, False)
    assert found.expert_ids[1].tolist() == found.expert_ids[3].tolist() == [-1, -1, -1]
    same(found, route_in_torch(logits, bias, request, rule, False))


def test_the_shared_expert_stands_behind_the_others_with_weight_1() -> None:
    logits, bias = given(4, 12)
    request = torch.tensor([0, -1, 2, 3], dtype=torch.int32)
    found = route_experts(logits, bias, request, RULES[5][1], False)
    assert found.expert_ids[:, 3].tolist() == [12, -1, 12, 12]
    assert found.weights[:, 3].tolist() == [1, 0, 1, 1]
    without = route_experts(logits, bias, request, RouterRule(3, 4, 2, True, 2.5), False)
    assert torch.equal(found.expert_ids[:, :3], without.expert_ids)
    assert torch.equal(found.weights[:, :3], without.weights)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 3.0, 0.0, 2.0])
    found = route_experts(logits, bias, None, RouterRule(2, 1, 1, True, 4.0), True)
    assert found.expert_ids.tolist() == [[1, 3]]
    assert found.weights.tolist() == [[2.0, 2.0]]
    assert found.margin is not None
    assert found.margin.tolist() == [2.0]


def test_ties_go_to_the_lower_expert() -> None:
    found = route_experts(
        torch.zeros(1, 8), torch.zeros(8), None, RouterRule(3, 4, 2, True, 1.0), True
    )
    assert found.expert_ids.tolist() == [[0, 1, 2]]
    assert found.margin is not None
    assert found.margin.tolist() == [0.0]


def test_a_nan_is_taken_last_and_once() -> None:
    logits = torch.tensor([[math.nan, 1.0, math.nan, 0.5]])
    found = route_experts(logits, torch.zeros(4), None, RouterRule(3, 1, 1, True, 1.0), False)
    assert found.expert_ids.tolist() == [[1, 3, 0]]
    assert found.weights.isnan().all()
