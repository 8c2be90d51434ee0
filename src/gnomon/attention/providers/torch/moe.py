"""Mixture of experts of the torch provider: rows sorted by expert, one matmul pair an expert.

In:  x [R, D], expert ids [R, k] (−1 adds nothing) and weights. Out: [R, D] in x's dtype.
`moe` is the fast one: torch's grouped product while the sorted rows fit the cache, batches of
experts beyond. In `moe_fixed` each expert's rows are padded to a multiple of 16, because a matmul
with fewer rows takes another path and other bits (environment.md §2); then, in fp32, a row's bits
depend on that row alone: its experts' products are added in ascending order of the expert.
Maths: oracle_math.md §1.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.attention.providers.torch.norms import widen

FIXED_ROWS = 16
GROUPED_CHOICES = 2048  # choices (rows times k) up to which one grouped product is the fastest
HIDDEN_NUMBERS = 1 << 16  # hidden values of one batch of groups: 256 KiB fp32, a core's cache


def moe(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Σ_j weight · down_e(silu(gate_e x) · up_e x); gate_up [E, 2I, D], the gate rows first."""
    if x.shape[0] == 1:
        return _one_row(x, expert_ids, expert_weights, gate_up, down)
    if expert_ids.numel() <= GROUPED_CHOICES and _can_group(gate_up, down):
        return _grouped(x, expert_ids, expert_weights, gate_up, down)
    return _batched(x, expert_ids, expert_weights, (gate_up, down), 1)


def moe_fixed(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """The same; in fp32 a row's bits depend on that row alone."""
    return _batched(x, expert_ids, expert_weights, (gate_up, down), FIXED_ROWS)


def _one_row(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """A lone row has nothing to sort."""
    ids: list[int] = expert_ids[0].tolist()
    places = [place for place, expert in enumerate(ids) if expert >= 0]
    if not places:
        return torch.zeros_like(x)
    hidden = torch.cat([F.linear(x, gate_up[ids[place]]) for place in places])
    active = _activate(hidden)
    products = torch.cat([F.linear(active[i : i + 1], down[ids[p]]) for i, p in enumerate(places)])
    shares = expert_weights if len(places) == len(ids) else expert_weights[:, places]
    return torch.mm(shares.to(widen(products).dtype), widen(products)).to(x.dtype)


def _grouped(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """One grouped product for all experts' rows, and one for their results."""
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1)
    num_none = int(sizes[0])
    if num_none == flat.shape[0]:
        return torch.zeros_like(x)
    order = order[num_none:]
    ends = sizes[1:].cumsum(0, dtype=torch.int32)
    rows = order.div(expert_ids.shape[1], rounding_mode="floor")
    hidden = F.grouped_mm(x.index_select(0, rows), gate_up.mT, offs=ends)
    products = widen(F.grouped_mm(_activate(hidden), down.mT, offs=ends))
    shares = expert_weights.reshape(-1).index_select(0, order)[:, None].to(products.dtype)
    return products.new_zeros(x.shape).index_add_(0, rows, products * shares).to(x.dtype)


def _can_group(gate_up: Tensor, down: Tensor) -> bool:
    """The grouped product on a CPU runs: not in fp64, and with strides of whole 16 bytes."""
    widths = (gate_up.shape[-1], down.shape[-1])
    return (
        gate_up.device.type == "cpu"
        and gate_up.dtype != torch.float64
        and all(width * gate_up.element_size() % 16 == 0 for width in widths)
        and gate_up.is_contiguous()
        and down.is_contiguous()
    )


def _activate(hidden: Tensor) -> Tensor:
    """silu(gate) · up of hidden [n, 2I]."""
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate).mul_(up)


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


def _batched(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: tuple[Tensor, Tensor],
    group_rows: int,
) -> Tensor:
    """Experts one after another, each one's rows padded to a multiple of ``group_rows``.

    Small groups share their gather and their activation, so that few calls are made.
    """
    gate_up, down = experts
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    num_none, *sizes = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
    rows = order.div(expert_ids.shape[1], rounding_mode="floor")
    out = widen(x).new_zeros(x.shape)
    shares = expert_weights.reshape(-1).index_select(0, order)[:, None].to(out.dtype)
    limits = (HIDDEN_NUMBERS // gate_up.shape[1], group_rows)
    batches = list(_batches(sizes, num_none, limits))
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
    for expert, start, stop in batch.groups:
        torch.mm(inputs[start:stop], gate_up[expert].T, out=hidden[start:stop])
    used = hidden[: batch.num_padded]
    active = _activate(used)
    for expert, start, stop in batch.groups:
        torch.mm(active[start:stop], down[expert].T, out=outputs[start:stop])


def _batches(sizes: list[int], first: int, limits: tuple[int, int]) -> Iterator[_Batch]:
    """Experts with rows, in order, as many together as fit the padded rows of a batch.

    ``limits``: (padded rows of a batch, padding multiple of a group).
    """
    most_rows, group_rows = limits
    groups: list[tuple[int, int, int]] = []
    places: list[int] = []
    start = stop = first
    padded = 0
    for expert, size in enumerate(sizes):
        if size == 0:
            continue
        grown = padded + -(-size // group_rows) * group_rows
        if groups and grown > most_rows:
            yield _Batch(tuple(groups), start, stop, places)
            groups, places, start = [], [], stop
            grown, padded = grown - padded, 0
        groups.append((expert, padded, grown))
        places += range(padded, padded + size)
        padded, stop = grown, stop + size
    if groups:
        yield _Batch(tuple(groups), start, stop, places)
