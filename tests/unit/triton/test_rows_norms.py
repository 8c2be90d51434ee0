"""Norms and rotations of the triton provider, under the interpreter, against their specs."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.providers.torch import norms as torch_norms
from gnomon.attention.providers.triton import PROVIDER, rows
from gnomon.attention.spec import SPECS, Scale, check_provider
from gnomon.attention.spec.draw import normal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = Scale(num_rows=7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "rope"])
def test_every_case_of_the_spec(op: str, dtype: torch.dtype) -> None:
    for case in SPECS[op].cases(torch.Generator().manual_seed(3), dtype, SCALE):
        result = check_provider(SPECS[op], PROVIDER, case, dtype)
        assert result.is_ok, result


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_a_wider_product_are_normed_in_place(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    wide, weight = normal(generator, (5, 57), dtype), normal(generator, (24,), dtype)
    found = rows.rms_norm(wide[:, 16:40], weight, 1e-6)
    assert torch.equal(found, rows.rms_norm(wide[:, 16:40].contiguous(), weight, 1e-6))
    torch.testing.assert_close(found, torch_norms.rms_norm(wide[:, 16:40], weight, 1e-6))


def test_a_weight_of_another_dtype() -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = normal(generator, (4, 48), torch.bfloat16), normal(generator, (48,), torch.float32)
    found = rows.rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, torch_norms.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_a_norm_with_its_residual_is_the_two_calls(num_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    x, delta = (normal(generator, (num_rows, 72), dtype) for _ in range(2))
    weight = normal(generator, (72,), dtype)
    total, normed = rows.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, rows.rms_norm(x + delta, weight, 1e-5))


def test_a_row_has_the_same_bits_alone() -> None:
    x = normal(torch.Generator().manual_seed(7), (5, 96), torch.float32)
    weight = torch.ones(96)
    together = rows.rms_norm(x, weight, 1e-6)
    for row in range(5):
        assert torch.equal(rows.rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])
