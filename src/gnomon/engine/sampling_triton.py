"""sampling_draw.choose on a GPU: all rows, greedy and drawn, in two launches.

In:  float32 logits [M, V] on the device, last dim contiguous; Wishes on the host; a Cut there.
Out: Chosen. A row's token depends on that row alone.
A program of the first kernel takes a block of one row's vocabulary: noise by Philox, score, best
and maximum of the block; one of the second takes the best of a row's blocks, the first of equals.
Scores are float64, as on a CPU: the tokens are the same but for the last bits of log().
Not here: filters (sampling_filters.py) and the definition of it all (sampling_draw.py).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.upload import upload
from gnomon.engine.sampling_draw import Chosen, Cut, Wishes
from gnomon.engine.sampling_noise import SAMPLE_PURPOSE

GREEDY_BLOCK = 4096
DRAWN_BLOCK = 1024
NUM_WARPS = 4
PURPOSE = tl.constexpr(SAMPLE_PURPOSE)
TINY = tl.constexpr(2.0**-32)


@triton.jit
def gumbel_block(seed, position, choice, first, BLOCK: tl.constexpr):
    """float64 [BLOCK]: sampling_noise.gumbels of the tokens first, first + 1, ...; 4 | first."""
    quarter = tl.arange(0, BLOCK // 4)
    block = (first // 4 + quarter).to(tl.uint32)
    zero = tl.zeros_like(block)
    a, b, c, d = tl.philox(
        seed, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero + PURPOSE, block
    )
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    uniform = (words.to(tl.float64) + 0.5) * TINY
    return -tl.log(-tl.log(1.0 - uniform))  # 1 − u has 33 bits: exact


@triton.jit(do_not_specialize=["num_rows"])  # else compiled anew for 1 row, and for 16
def block_best_kernel(
    logits,
    keys,
    temperatures,
    cut_logit,
    cut_id,
    best_score,
    best_id,
    greatest,
    stride,
    V,
    num_rows,
    num_blocks,
    IS_DRAWN: tl.constexpr,
    HAS_CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best score and its token, and the maximum, of one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    inside = token < V
    value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    has_nan = tl.max((value != value).to(tl.int32), 0) > 0
    clean = tl.where(value == value, value, float("-inf"))
    place = row * num_blocks + tl.program_id(1)
    largest = tl.max(clean, 0)
    tl.store(greatest + place, tl.where(has_nan, float("nan"), largest))
    best = largest.to(tl.float64)
    is_best = clean == largest
    if IS_DRAWN:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            seed = tl.load(keys + row)
            position = tl.load(keys + num_rows + row)
            choice = tl.load(keys + 2 * num_rows + row)
            noise = gumbel_block(seed, position, choice, first, BLOCK)
            score = clean.to(tl.float64) + temperature * noise
            if HAS_CUT:
                edge = tl.load(cut_logit + row)
                last = tl.load(cut_id + row)
                is_kept = (clean > edge) | ((clean == edge) & (token <= last))
                score = tl.where(is_kept, score, float("-inf"))
            best = tl.max(score, 0)
            is_best = score == best
    tl.store(best_score + place, best)
    tl.store(best_id + place, tl.min(tl.where(is_best & inside, token, V - 1), 0))


@triton.jit
def row_best_kernel(
    best_score, best_id, greatest, token_ids, maxima, num_blocks, BLOCKS: tl.constexpr
):
    """The best of a row's blocks."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    place = row * num_blocks + block
    score = tl.load(best_score + place, mask=inside, other=float("-inf"))
    first = tl.min(tl.where((score == tl.max(score, 0)) & inside, block, num_blocks - 1), 0)
    tl.store(token_ids + row, tl.load(best_id + row * num_blocks + first).to(tl.int64))
    value = tl.load(greatest + place, mask=inside, other=float("-inf"))
    has_nan = tl.max((value != value).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(value == value, value, float("-inf")), 0)
    tl.store(maxima + row, tl.where(has_nan, float("nan"), largest).to(tl.float64))


def race(logits: Tensor, wishes: Wishes | None, cut: Cut | None) -> Chosen:
    """One token per row (module docstring); waits for nothing."""
    num_rows, num_tokens = logits.shape
    device = logits.device
    keys = temperatures = None
    if wishes is not None:
        table = np.stack([wishes.seed.view(np.int64), wishes.position, wishes.choice])
        keys, temperatures = upload([table, wishes.temperature], device)
    block = GREEDY_BLOCK if wishes is None else DRAWN_BLOCK
    num_blocks = -(-num_tokens // block)
    score = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=device)
    token = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    largest = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    chosen = Chosen(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.float64, device=device),
    )
    if num_rows == 0:
        return chosen
    block_best_kernel[(num_rows, num_blocks)](
        logits,
        keys,
        temperatures,
        None if cut is None else cut.logit,
        None if cut is None else cut.token_id,
        score,
        token,
        largest,
        logits.stride(0),
        num_tokens,
        num_rows,
        num_blocks,
        IS_DRAWN=wishes is not None,
        HAS_CUT=cut is not None,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    row_best_kernel[(num_rows,)](
        score,
        token,
        largest,
        chosen.token_ids,
        chosen.greatest,
        num_blocks,
        BLOCKS=max(16, triton.next_power_of_2(num_blocks)),
        num_warps=NUM_WARPS,
    )
    return chosen
