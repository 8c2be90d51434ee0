"""A float32 matrix as a sum of matrices of half the width: exact, or refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator

from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.providers import builtin_providers
from gnomon.models.linear import WideLinear, exact_parts

OPS, _ = bind_operators(OpNeed(), builtin_providers())


@pytest.mark.parametrize(("num_bits", "num_parts"), [(8, 1), (16, 2), (24, 3)])
def test_as_many_parts_as_the_numbers_have_bits(num_bits: int, num_parts: int) -> None:
    generator = Generator().manual_seed(1)
    mantissa = torch.randint(2 ** (num_bits - 1), 2**num_bits, (40, 30), generator=generator)
    sign = torch.randint(0, 2, (40, 30), generator=generator) * 2 - 1
    size = torch.randint(-20, 5, (40, 30), generator=generator).float().exp2()
    weight = (mantissa | 1).float() * size * sign
    parts = exact_parts(weight, torch.bfloat16)
    assert parts is not None
    assert parts.dtype == torch.bfloat16
    assert parts.shape == (num_parts, 40, 30)
    assert torch.equal(parts.double().sum(0), weight.double())


def test_what_three_parts_do_not_reach_is_refused() -> None:
    assert exact_parts(torch.tensor([[1.0, math.nan]]), torch.bfloat16) is None
    assert exact_parts(torch.tensor([[1e30]]), torch.float16) is None
    assert exact_parts(torch.tensor([[1e-30]]), torch.float16) is None


def test_zeros_are_one_part() -> None:
    parts = exact_parts(torch.zeros(2, 3), torch.bfloat16)
    assert parts is not None
    assert parts.shape == (1, 2, 3)


def test_on_a_cpu_the_product_is_float32() -> None:
    weight = torch.randn(5, 7, generator=Generator().manual_seed(2))
    layer = WideLinear.of({"router.weight": weight}, "router", torch.bfloat16)
    x = torch.randn(3, 7, generator=Generator().manual_seed(3)).bfloat16()
    assert layer.parts is None
    torch.testing.assert_close(layer(x, OPS), x.float() @ weight.T)
