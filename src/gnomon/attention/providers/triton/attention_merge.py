"""lse_merge of the triton provider: two partial attentions in one pass.

In:  out_a and out_b [..., D] of one dtype, lse_a and lse_b [...] fp32 natural; ``out`` (out, lse)
     to write into. Out: (out [..., D], lse [...]); (0, −inf) is the identity, to the bit.
A part whose lse is −inf is not read: what its rows hold does not matter.
Maths: oracle_math.md §1.2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.providers.triton.language import padded, round_to

BLOCK_NUMBERS = 2048  # numbers of a result that a program computes
Result = tuple[Tensor, Tensor]


@triton.jit(do_not_specialize=["num_rows"])
def merge_parts(
    out_a, lse_a, out_b, lse_b, out, lse, num_rows,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Program: BR rows of [num_rows, D]."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, DP)
    is_row = row < num_rows
    level_a = tl.load(lse_a + row, mask=is_row, other=float("-inf"))
    level_b = tl.load(lse_b + row, mask=is_row, other=float("-inf"))
    largest = tl.maximum(level_a, level_b)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(level_a - anchor), tl.exp(level_b - anchor)
    total = weight_a + weight_b
    at = row[:, None] * D + column[None, :]
    is_column = (column < D)[None, :]
    has_a, has_b = level_a != float("-inf"), level_b != float("-inf")
    a = tl.load(out_a + at, mask=has_a[:, None] & is_column, other=0.0).to(tl.float32)
    b = tl.load(out_b + at, mask=has_b[:, None] & is_column, other=0.0).to(tl.float32)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    mixed = (a * weight_a[:, None] + b * weight_b[:, None]) / total[:, None]
    level = tl.where(is_empty, float("-inf"), anchor + tl.log(total))
    mask = is_row[:, None] & is_column
    tl.store(out + at, round_to(mixed, out.dtype.element_ty), mask=mask)
    tl.store(lse + row, level, mask=is_row)


def lse_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Result | None = None
) -> Result:
    """Join two partial results over disjoint keys by their lse."""
    results = out or (out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape))
    width, num_rows = out_a.shape[-1], lse_a.numel()
    if out_a.numel() == 0:
        return results
    if not (results[0].is_contiguous() and results[1].is_contiguous()):
        inner = lse_merge(out_a, lse_a, out_b, lse_b)
        return results[0].copy_(inner[0]), results[1].copy_(inner[1])
    columns = padded(width)
    rows = max(1, BLOCK_NUMBERS // columns)
    parts = (out_a, lse_a, out_b, lse_b)
    merge_parts[(-(-num_rows // rows),)](
        *(part.contiguous() for part in parts), *results, num_rows, D=width, DP=columns, BR=rows
    )
    return results
