"""A norm that gives its rows in FP8 too: what rms_norm and quantise_rows give, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Generator

from gnomon.attention.providers.triton.linear_quantise import quantise_rows
from gnomon.attention.providers.triton.rows import add_rms_norm, rms_norm
from gnomon.attention.providers.triton.rows_quantise import norm_quantise
from gnomon.attention.spec.draw import normal


@pytest.mark.parametrize("is_power_of_two", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("width", [96, 384, 640])
@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(5, torch.bfloat16), (3, torch.float32), (0, torch.bfloat16)]
)
def test_one_launch_for_both(
    num_rows: int, dtype: torch.dtype, width: int, has_delta: bool, is_power_of_two: bool
) -> None:
    generator = Generator().manual_seed(1)
    x = normal(generator, (num_rows, width + 40), dtype)[:, 16 : 16 + width]
    delta = normal(generator, (num_rows, width), dtype) if has_delta else None
    weight = normal(generator, (width,), dtype)
    weight[: width // 3] *= 1e-4  # a group at the floor of the scale
    total, normed, quantised = norm_quantise(x, delta, weight, 1e-6, is_power_of_two)
    if delta is None:
        assert total is x
        expected = rms_norm(x, weight, 1e-6)
    else:
        sums, expected = add_rms_norm(x, delta, weight, 1e-6)
        assert torch.equal(total, sums)
    assert torch.equal(normed, expected)
    codes, scales = quantise_rows(expected, is_power_of_two)
    assert torch.equal(quantised[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(quantised[1], scales)
    assert quantised[1].stride() == scales.stride()


def test_a_number_that_is_not_finite_stays_in_its_row() -> None:
    x = torch.ones(2, 256)
    weight = torch.ones(256)
    weight[200] = torch.inf
    _, _, (codes, scales) = norm_quantise(x, None, weight, 1e-6, True)
    is_nan = codes.float().isnan()
    assert is_nan.nonzero()[:, 1].tolist() == [200, 200]
    assert scales.isfinite().all()
