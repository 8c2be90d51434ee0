"""Index scores of every row of B sequences, as one Triton kernel: for training on a GPU.

In:  query [B, T, Hi, Di], key [B, T, Di], weight [B, T, Hi] (scale included).
Out: scores [B, T, T] float32, −inf at future positions. No gradient.
Maths: sum over heads of weight * relu(query . key), oracle_math §1.5, in float32 from the inputs'
dtype. The plain form is `selection.scores_of`, which would write all heads' products to memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None

BLOCK_ROWS, BLOCK_KEYS = 64, 128

if triton is not None:

    @triton.jit
    def _kernel(
        query, key, weight, out, length,
        HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
        IS_FP32: tl.constexpr,
    ):  # fmt: skip
        batch = tl.program_id(2).to(tl.int64)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        place = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
        dim = tl.arange(0, DIM)
        is_row, is_place = row < length, place < length
        total = tl.zeros((ROWS, KEYS), dtype=tl.float32)
        if tl.program_id(0) * KEYS <= tl.program_id(1) * ROWS + ROWS - 1:
            keys = tl.load(
                key + (batch * length + place)[:, None] * DIM + dim[None, :],
                mask=is_place[:, None], other=0.0,
            )  # fmt: skip
            for head in range(HEADS):
                here = (batch * length + row) * HEADS + head
                q = tl.load(
                    query + here[:, None] * DIM + dim[None, :], mask=is_row[:, None], other=0.0
                )
                if IS_FP32:
                    dots = tl.dot(q, tl.trans(keys), input_precision="ieee")
                else:
                    dots = tl.dot(q, tl.trans(keys))
                w = tl.load(weight + here, mask=is_row, other=0.0)
                total += tl.maximum(dots, 0.0) * w[:, None]
        total = tl.where(place[None, :] <= row[:, None], total, float("-inf"))
        spot = (batch * length + row)[:, None] * length + place[None, :]
        tl.store(out + spot, total, mask=is_row[:, None] & is_place[None, :])


def causal_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Scores of all rows; the tensors lie where Triton runs."""
    batch, length, heads, dim = query.shape
    out = torch.empty(batch, length, length, dtype=torch.float32, device=query.device)
    grid = (triton.cdiv(length, BLOCK_KEYS), triton.cdiv(length, BLOCK_ROWS), batch)
    _kernel[grid](
        query.contiguous(), key.contiguous(), weight.float().contiguous(), out, length,
        HEADS=heads, DIM=dim, ROWS=BLOCK_ROWS, KEYS=BLOCK_KEYS,
        IS_FP32=query.dtype is torch.float32,
    )  # fmt: skip
    return out
