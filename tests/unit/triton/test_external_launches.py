"""The launches of the external adapters under the interpreter, against their plain forms."""

from __future__ import annotations

import math

import pytest
import torch

from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.providers.external import codes, launches, padding
from tests.unit.triton.launch_keys import watching

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_hold_the_values_exactly(dtype: torch.dtype) -> None:
    layout = Fp8IndexKeyLayout(32, dtype)
    values = layout.round_queries((torch.randn(5, 3, 32) * 3).to(dtype))
    values[1, 1] = 0
    weights = torch.randn(5, 6).to(dtype)[:, ::2]  # strided
    found, scales = launches.codes_of_rows(values)
    assert torch.equal(found.float() * scales[..., None], values.float())
    plain, plain_scales = codes._codes(values)
    assert torch.equal(found.float(), plain.float())
    assert torch.equal(scales, plain_scales)
    found, folded = launches.codes_of_rows(values, weights, 0.25)
    assert torch.equal(found.float(), plain.float())
    assert torch.equal(folded, weights.float() * 0.25 * plain_scales)


def test_values_that_are_not_finite_make_their_scale_nan() -> None:
    values = torch.ones(2, 2, 16)
    values[0, 1, 3], values[1, 0, 0] = math.nan, math.inf
    _, scales = launches.codes_of_rows(values)
    assert scales.isnan().tolist() == [[False, True], [True, False]]
    assert torch.equal(codes._codes(values)[1].isnan(), scales.isnan())


@pytest.mark.parametrize("num_heads", [3, 16, 64, 65])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [7, 64, 2100])
def test_queries_and_lists_are_packed_in_one_launch(
    num_heads: int, dtype: torch.dtype, width: int
) -> None:
    latent = torch.randn(num_heads, 2, 48).bfloat16().transpose(0, 1)
    rope = torch.randn(2, num_heads, 24).bfloat16()[..., 8:]
    slots = torch.randint(0, 99, (2, width + 3), dtype=dtype)[:, :width]
    heads, held = padding.padded_heads(num_heads), -(-width // 64) * 64
    query, lists = launches.packed_operands(latent, rope, heads, slots, held)
    expected_query, expected_lists = padding.pad_operands(latent, rope, slots, 64)
    assert torch.equal(query, expected_query)
    assert torch.equal(lists, expected_lists)


def test_lists_that_fit_are_not_copied() -> None:
    slots = torch.arange(128, dtype=torch.int32).view(2, 64)
    rows = torch.randn(2, 3, 32).bfloat16()
    assert launches.packed_operands(rows, rows, 64, slots, 64)[1] is slots


@pytest.mark.parametrize("width", [7, 64, 2100])
def test_lists_are_packed(width: int) -> None:
    slots = torch.randint(0, 99, (3, width + 3))[:, :width]
    held = -(-width // 64) * 64
    rows = torch.randn(3, 2, 16)
    expected = padding.pad_operands(rows, rows, slots, 64)[1]
    assert torch.equal(launches.packed_lists(slots, held), expected)


def test_queries_that_stand_side_by_side_are_not_copied() -> None:
    joint = torch.randn(3, 64, 40)
    latent, rope = joint[..., :32], joint[..., 32:]
    slots = torch.arange(192, dtype=torch.int32).view(3, 64)
    query, lists = padding.pad_operands(latent, rope, slots, 64)
    assert query.data_ptr() == joint.data_ptr()
    assert torch.equal(query, joint)
    assert lists is slots
    query, _ = padding.pad_operands(latent, rope, slots[:, :50].long(), 64)
    assert query.data_ptr() == joint.data_ptr()
    for apart in (rope.clone(), joint[..., 24:32]):
        query, _ = padding.pad_operands(latent, apart, slots, 64)
        assert torch.equal(query, torch.cat((latent, apart), -1))
    few = torch.randn(3, 16, 40)
    query, _ = padding.pad_operands(few[..., :32], few[..., 32:], slots, 64)
    assert torch.equal(query[:, :16], few)
    assert not query[:, 16:].any()


def test_tails_and_blind_rows_are_cleared_and_nothing_else() -> None:
    count = torch.tensor([0, 3, 5000, 2048], dtype=torch.int32)
    scores = torch.randn(4, 5100)[:, :5000]
    before = scores.clone()
    launches.hide_tails(scores, count)
    hidden = torch.arange(5000) >= count[:, None]
    assert torch.equal(scores, before.masked_fill(hidden, -math.inf))
    out, lse = torch.randn(4, 3, 20).bfloat16(), torch.randn(3, 4).T
    kept_out, kept_lse = out.clone(), lse.clone()
    launches.clear_blind(out, lse, count)
    assert torch.equal(out[1:], kept_out[1:])
    assert torch.equal(lse[1:], kept_lse[1:])
    assert not out[0].any()
    assert bool((lse[0] == -math.inf).all())


def test_rows_are_mixed_and_holes_not_read() -> None:
    out = torch.randn(6, 2100).bfloat16()
    out[5] = math.nan
    ids = torch.tensor([[2, 0], [-1, 1], [-1, -1]])
    place = torch.tensor([[4, 1], [5, 2], [5, 5]])
    weights = torch.rand(3, 4).bfloat16()[:, ::2]
    found = launches.mixed_rows(out, place, ids, weights)
    w = weights.float()
    expected = torch.stack(
        [
            w[0, 0] * out[4].float() + w[0, 1] * out[1].float(),
            w[1, 1] * out[2].float(),
            torch.zeros(2100),
        ]
    )
    torch.testing.assert_close(found.float(), expected, atol=1e-6, rtol=2.0**-8)


def test_page_tables_by_row_reach_as_far_as_rows_do() -> None:
    pages = torch.randint(1, 99, (3, 600), dtype=torch.int32)[:, :520]
    request = torch.tensor([2, -1, 0, 1, 1], dtype=torch.int32)
    count = torch.tensor([520 * 64, 0, 1, 64 * 256, 64 * 256 + 1], dtype=torch.int32)
    found = launches.pages_of_rows(pages, request, count, 64)
    assert found.shape == (5, 520)
    for row, (owner, length) in enumerate(zip(request.tolist(), count.tolist(), strict=True)):
        reach = -(-length // 64)
        assert torch.equal(found[row, :reach], pages[owner, :reach])


def test_forms_do_not_hang_on_the_size_of_a_step() -> None:
    """One kernel of each, however many rows a step has and however long its requests are."""
    with watching() as seen:
        for rows, width in ((1, 1), (2, 16), (3, 17), (16, 32), (40, 33)):
            count = torch.ones(rows, dtype=torch.int32)
            launches.pages_of_rows(torch.zeros(2, width, dtype=torch.int32), count, count, 64)
            launches.hide_tails(torch.zeros(rows, 64 * width), count)
            lse = torch.zeros(16, rows).T  # as FA3 gives it
            launches.clear_blind(torch.zeros(rows, 16, 128, dtype=torch.bfloat16), lse, count)
    assert sorted(name for name, _ in seen) == ["_clear", "_hide", "_tables"]
