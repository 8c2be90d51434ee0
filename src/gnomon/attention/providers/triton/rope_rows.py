"""The rotations of a step's rows out of a model's table, in one launch instead of six.

In:  cos, sin [positions, D / 2] (a RopeTable's), positions [R] of the rows, the convention.
Out: cos, signed sin [R, D], as ops/values.py's RopeTable.at has them: copies, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.providers.triton.language import padded

ROWS = 4


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["position"])
def rope_rows_kernel(
    cos, sin, position, cos_out, sin_out, num_rows,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """ROWS rows; column 2i and 2i + 1, or i and i + DIM / 2, have angle i."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    HALF: tl.constexpr = DIM // 2
    if IS_INTERLEAVED:
        angle, is_first = column // 2, column % 2 == 0
    else:
        angle, is_first = column % HALF, column < HALF
    is_row = row < num_rows
    mask = is_row[:, None] & (column < DIM)[None, :]
    at = tl.load(position + row, mask=is_row, other=0).to(tl.int64)
    source = at[:, None] * HALF + angle[None, :]
    target = row.to(tl.int64)[:, None] * DIM + column[None, :]
    tl.store(cos_out + target, tl.load(cos + source, mask=mask, other=0.0), mask=mask)
    turned = tl.load(sin + source, mask=mask, other=0.0)
    tl.store(sin_out + target, tl.where(is_first[None, :], -turned, turned), mask=mask)


def rope_rows(
    cos: Tensor, sin: Tensor, position: Tensor, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Module docstring."""
    num_rows, dim = position.shape[0], 2 * cos.shape[1]
    out = torch.empty((2, num_rows, dim), dtype=cos.dtype, device=cos.device)
    if num_rows and dim:
        rope_rows_kernel[(triton.cdiv(num_rows, ROWS),)](
            cos, sin, position, out[0], out[1], num_rows,
            dim, padded(dim), ROWS, is_interleaved, num_warps=1,
        )  # fmt: skip
    return out[0], out[1]


FUSIONS: dict[str, Callable[..., Any]] = {"rope_rows": rope_rows}
