"""Mixture of experts of the torch provider: sort by expert, one matmul pair an expert.

In:  x [R, D], expert ids [R, k] (−1 adds nothing) and weights. Out: [R, D] in x's dtype.
Each expert's rows are padded to a multiple of 16, because a matmul with fewer rows takes another
path and other bits (environment.md §2); then, in fp32, a row's bits depend on that row alone: its
experts' products are added in ascending order of the expert. Small groups share their gather and
their activation, so that a decode step makes few calls. Maths: oracle_math.md §1.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.attention.providers.torch.norms import widen

GROUP_ROWS = 16
HIDDEN_NUMBERS = 1 << 16  # hidden values of one batch of groups: 256 KiB fp32, a core's cache


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive experts done together: (expert, first and last padded row), and their places.

    Sorted choices ``start`` .. ``stop`` − 1 belong to them; choice i lies at padded row places[i].
    """

    groups: tuple[tuple[int, int, int], ...]
    start: int
    stop: int
    places: list[int]

    @property
    def num_padded(self) -> int:
        return self.groups[-1][2]


def moe(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Σ_j weight · down_e(silu(gate_e x) · up_e x); gate_up [E, 2I, D], the gate rows first."""
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    num_none, *sizes = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
    rows = order.div(expert_ids.shape[1], rounding_mode="floor")
    out = widen(x).new_zeros(x.shape)
    shares = expert_weights.reshape(-1).index_select(0, order)[:, None].to(out.dtype)
    batches = list(_batches(sizes, num_none, HIDDEN_NUMBERS // gate_up.shape[1]))
    most = max([0, *(batch.num_padded for batch in batches)])
    # One set of buffers for all batches. Padding rows hold zeros or an earlier batch's rows; their
    # results are dropped.
    inputs, outputs = x.new_zeros(most, x.shape[1]), x.new_empty(most, x.shape[1])
    hidden = x.new_empty(most, gate_up.shape[1])
    for batch in batches:
        here = rows[batch.start : batch.stop]
        if len(batch.groups) == 1:
            torch.index_select(x, 0, here, out=inputs[: here.shape[0]])
            _run_experts(batch, gate_up, down, (inputs, hidden, outputs))
            products = outputs[: here.shape[0]]
        else:
            places = torch.tensor(batch.places, device=x.device)
            inputs.index_copy_(0, places, x.index_select(0, here))
            _run_experts(batch, gate_up, down, (inputs, hidden, outputs))
            products = outputs.index_select(0, places)
        out.index_add_(0, here, widen(products) * shares[batch.start : batch.stop])
    return out.to(x.dtype)


def _run_experts(
    batch: _Batch, gate_up: Tensor, down: Tensor, buffers: tuple[Tensor, Tensor, Tensor]
) -> None:
    """From the inputs to the outputs of ``buffers`` (inputs, hidden, outputs)."""
    inputs, hidden, outputs = buffers
    width = down.shape[-1]
    for expert, start, stop in batch.groups:
        torch.mm(inputs[start:stop], gate_up[expert].T, out=hidden[start:stop])
    used = hidden[: batch.num_padded]
    active = F.silu(used[:, :width]).mul_(used[:, width:])
    for expert, start, stop in batch.groups:
        torch.mm(active[start:stop], down[expert].T, out=outputs[start:stop])


def _batches(sizes: list[int], first: int, most_rows: int) -> Iterator[_Batch]:
    """Experts with rows, in order, as many together as fit ``most_rows`` padded rows."""
    groups: list[tuple[int, int, int]] = []
    places: list[int] = []
    start = stop = first
    padded = 0
    for expert, size in enumerate(sizes):
        if size == 0:
            continue
        grown = padded + -(-size // GROUP_ROWS) * GROUP_ROWS
        if groups and grown > most_rows:
            yield _Batch(tuple(groups), start, stop, places)
            groups, places, start = [], [], stop
            grown, padded = grown - padded, 0
        groups.append((expert, padded, grown))
        places += range(padded, padded + size)
        padded, stop = grown, stop + size
    if groups:
        yield _Batch(tuple(groups), start, stop, places)
