"""Narrow products of one input under the interpreter: exact sums of whole numbers, and routing."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.ops.routing import RouterRule, route
from gnomon.attention.providers.triton import narrow
from gnomon.attention.providers.triton.narrow import index_products, narrow_sums, route_products

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
RULE = RouterRule(3, 4, 2, True, 2.5, shared_expert=12)


def whole(generator: Generator, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers whose products and sums are exact in fp32."""
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "depth", "first", "second", "parts"),
    [(1, 800, 16, 4, 1), (5, 1200, 70, 6, 3), (70, 136, 64, 65, 2)],
)
def test_both_products_are_exact(
    num_rows: int, depth: int, first: int, second: int, parts: int, dtype: torch.dtype
) -> None:
    generator = Generator().manual_seed(1)
    x = whole(generator, (num_rows, depth + 8), dtype)[:, :depth]
    key = whole(generator, (first, depth), dtype)
    weights = whole(generator, (parts * second, depth), dtype)
    found = index_products(x, key, weights, second)
    assert found is not None
    product = (x.double() @ key.double().T).to(dtype)
    assert torch.equal(found[0], product)
    summed = weights.double().view(parts, second, depth).sum(0)
    assert found[1].dtype == torch.float32
    assert torch.equal(found[1].double(), x.double() @ summed.T)


def test_head_weights_without_keys() -> None:
    generator = Generator().manual_seed(5)
    x, weights = (whole(generator, (n, 800), torch.bfloat16) for n in (3, 2 * 6))
    found = index_products(x, None, weights, 6)
    assert found is not None
    assert found[0] is None
    assert torch.equal(found[1].double(), x.double() @ weights.double().view(2, 6, 800).sum(0).T)


def test_more_splits_than_steps_leave_zeros() -> None:
    """K of 6 and more steps in 5 parts of 2: the last has nothing to add."""
    generator = Generator().manual_seed(2)
    depth = 5 * narrow.LEAST_DEPTH + 8
    x, weight = (whole(generator, (n, depth), torch.bfloat16) for n in (2, 4))
    sums = narrow_sums(x, None, weight, 4)
    assert sums.shape == (5, 2, 4)
    assert torch.equal(sums.sum(0).double(), x.double() @ weight.double().T)


def test_routing_by_parts_of_logits_is_routing_by_logits() -> None:
    generator = Generator().manual_seed(3)
    x = torch.randn(9, 900, generator=generator).bfloat16()
    router = (torch.randn(2 * 12, 900, generator=generator) * 0.1).bfloat16()
    bias = torch.randn(12, generator=generator) * 0.3
    request = torch.tensor([0, -1, 1, 2, 3, 4, 5, -1, 6], dtype=torch.int32)
    found = route_products(x, router, bias, request, RULE)
    logits = x.float() @ router.float().view(2, 12, 900).sum(0).T
    expected = route(logits, bias, request, RULE, False)
    assert found is not None
    assert torch.equal(found.expert_ids, expected.expert_ids)
    live = expected.expert_ids >= 0
    torch.testing.assert_close(found.weights[live], expected.weights[live], rtol=1e-5, atol=1e-6)


def test_many_rows_and_fp32_are_left_to_others() -> None:
    weight = torch.zeros(4, 64)
    assert index_products(torch.zeros(2, 64), weight, weight, 4) is None
    half = weight.bfloat16()
    many = torch.zeros(narrow.MOST_ROWS + 1, 64).bfloat16()
    assert index_products(many, half, half, 4) is None
    assert route_products(many, half, torch.zeros(4), None, RULE) is None
    assert index_products(many[:0], half, half, 4) is None
