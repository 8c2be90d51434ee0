"""The probed row multiple keeps its promise on shapes that it did not try."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gnomon.attention.row_bits import safe_row_multiple


@pytest.mark.parametrize("shape", [(24, 20), (192, 96), (512, 256), (576, 2048)])
def test_rows_in_multiples_have_the_bits_of_the_whole(shape: tuple[int, int]) -> None:
    multiple = safe_row_multiple()
    assert multiple in (4, 8, 16)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    rows = torch.randn(200, shape[1], generator=generator)
    whole = F.linear(rows, weight)
    for num_rows in range(multiple, 129, multiple):
        assert torch.equal(F.linear(rows[:num_rows], weight), whole[:num_rows])


def test_the_probe_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    safe_row_multiple()
    assert torch.equal(torch.rand(4), expected)
