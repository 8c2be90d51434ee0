"""step_checks.row_flags on a GPU: one launch, which a graph can capture.

In:  hidden [R, D], last dim contiguous, any float dtype; nan_rows bool [R].
Out: bool [2, R]: rows that are not finite; nan_rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 4096  # columns looked at in one turn


@triton.jit(do_not_specialize=["num_rows"])  # else compiled anew for 1 row, and for 16
def row_flags_kernel(hidden, nan_rows, out, stride, num_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """One row: whether an exponent of it, as fp32, is all ones; and its flag."""
    row = tl.program_id(0)
    bad = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, D, BLOCK):
        column = first + tl.arange(0, BLOCK)
        source = hidden + row.to(tl.int64) * stride + column
        value = tl.load(source, mask=column < D, other=0.0).to(tl.float32)
        bits = value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
        bad |= (bits >= 0x7F800000).to(tl.int32)
    tl.store(out + row, tl.max(bad, 0) > 0)
    tl.store(out + num_rows + row, tl.load(nan_rows + row))


def row_flags(hidden: Tensor, nan_rows: Tensor) -> Tensor:
    """Module docstring."""
    num_rows, width = hidden.shape
    out = torch.empty((2, num_rows), dtype=torch.bool, device=hidden.device)
    if num_rows:
        row_flags_kernel[(num_rows,)](
            hidden,
            nan_rows.contiguous(),
            out,
            hidden.stride(0),
            num_rows,
            D=width,
            BLOCK=min(MOST, triton.next_power_of_2(width)),
            num_warps=4,
        )
    return out
