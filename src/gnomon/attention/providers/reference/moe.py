"""Reference mixture of experts: one row, one expert after the other, in float64.

In:  x [R, D], expert ids [R, k] (−1 adds nothing) and weights. Out: [R, D] in x's dtype.
Maths: oracle_math.md §1.7, without the router and without the shared experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moe(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Σ_j weight · down_e(silu(gate_e x) · up_e x); gate_up [E, 2I, D], the gate rows first."""
    width = down.shape[-1]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, experts in enumerate(expert_ids.tolist()):
        for place, expert in enumerate(experts):
            if expert < 0:
                continue
            hidden = gate_up[expert].double() @ x[row].double()
            gate, up = hidden[:width], hidden[width:]
            activated = gate / (1 + (-gate).exp()) * up
            out[row] += expert_weights[row, place].double() * (down[expert].double() @ activated)
    return out.to(x.dtype)
