"""Mixture of experts of the torch provider: sort by expert, one matmul pair an expert.

In:  x [R, D], expert ids [R, k] (−1 adds nothing) and weights. Out: [R, D] in x's dtype.
Each expert's rows are padded to a multiple of 16, because a matmul with fewer rows takes another
path and other bits (environment.md §2); then, in fp32, a row's bits depend on that row alone: its
experts' products are added in ascending order of the expert. Maths: oracle_math.md §1.7.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.attention.providers.torch.norms import widen

GROUP_ROWS = 16


def moe(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Σ_j weight · down_e(silu(gate_e x) · up_e x); gate_up [E, 2I, D], the gate rows first."""
    num_experts, width = gate_up.shape[0], down.shape[-1]
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
    num_none, *group_sizes = counts
    out = widen(x).new_zeros(x.shape)
    most = -(-max(group_sizes) // GROUP_ROWS) * GROUP_ROWS
    if most == 0:
        return out.to(x.dtype)
    rows = order.div(expert_ids.shape[1], rounding_mode="floor")
    shares = expert_weights.reshape(-1).index_select(0, order)[:, None].to(out.dtype)
    inputs = x.new_zeros(most, x.shape[1])
    hidden, outputs = x.new_empty(most, 2 * width), x.new_empty(most, x.shape[1])
    stops = accumulate(group_sizes, initial=num_none)
    for expert, (size, start) in enumerate(zip(group_sizes, stops, strict=False)):
        if size == 0:
            continue
        padded = -(-size // GROUP_ROWS) * GROUP_ROWS
        group = rows[start : start + size]
        # Rows behind `size` hold an earlier group's values; their results are dropped.
        torch.index_select(x, 0, group, out=inputs[:size])
        torch.mm(inputs[:padded], gate_up[expert].T, out=hidden[:padded])
        active = F.silu(hidden[:padded, :width]).mul_(hidden[:padded, width:])
        torch.mm(active, down[expert].T, out=outputs[:padded])
        out.index_add_(0, group, widen(outputs[:size]) * shares[start : start + size])
    return out.to(x.dtype)
