"""FP8 experts through DeepGEMM's grouped product: rows sorted by expert, in whole blocks of 128.

In:  what moe_fp8 takes (spec/linear.py). Out: as there.
Contract of the library: kernels.md §1.14, "contiguous": rows of one expert adjoin and fill whole
blocks; a block that belongs to nobody is marked −1 and skipped. How many blocks there are at most
hangs on shapes alone, so nothing waits for the device and the call can be captured; memory is that
of the worst case. Meant for many rows: with few rows an expert's block is mostly padding. Many rows
go by chunks of one size, so that a weight needs one compiled kernel, whatever the number of rows.
Hidden values are rounded to bf16 once, between the first product and silu.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gnomon.attention.providers.external import portable
from gnomon.attention.providers.torch.linear import silu_quantise as plain_silu_quantise

BLOCK = 128  # rows of one expert adjoin in multiples of it
CHUNK = 8192  # sorted rows of a call, where there are more
GROUP = 128

Codes = tuple[Tensor, Tensor]


class GroupedProducts(Protocol):
    """What is called of the package `deep_gemm`."""

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Codes, b: Codes, d: Tensor, experts: Tensor, *, disable_ue8m0_cast: bool
    ) -> None:
        """Rows of d [T, N] = rows of a [T, K] · b[experts[row]] ([N, K])ᵀ; −1: left as they are."""


class ExpertRows(NamedTuple):
    """T rows sorted by expert: the row of x that each copies, whose it is, and where pairs went.

    source int64 [T]; expert int32 [T], −1 where nobody's; place int64 [R · k], of pair (r, j).
    """

    source: Tensor
    expert: Tensor
    place: Tensor


def sorted_rows(expert_ids: Tensor, num_experts: int) -> ExpertRows:
    """Sort the pairs of expert_ids [R, k] (−1: none, sorted behind all experts)."""
    ids, device = expert_ids.flatten(), expert_ids.device
    num_pairs, num_choices = ids.shape[0], expert_ids.shape[1]
    most = num_pairs + num_experts * (BLOCK - 1)
    unit = CHUNK if most > CHUNK else BLOCK
    most = -(-most // unit) * unit
    key = torch.where(ids < 0, num_experts, ids)
    ordered, order = key.sort(stable=True)
    count = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    count.scatter_add_(0, key, torch.ones_like(key))
    held = (count + (BLOCK - 1)) // BLOCK * BLOCK
    start, first = held.cumsum(0) - held, count.cumsum(0) - count
    where = torch.arange(num_pairs, device=device) + (start - first)[ordered]
    source = torch.zeros(most, dtype=torch.int64, device=device)
    source.scatter_(0, where, order // num_choices)
    place = torch.empty_like(order).scatter_(0, order, where)
    rows = torch.arange(most, device=device)
    owner = torch.searchsorted(start[1:].contiguous(), rows, right=True)
    owner = owner.masked_fill(owner >= num_experts, -1)
    return ExpertRows(source, owner.to(torch.int32), place)


def moe_fp8(
    library: GroupedProducts,
    x: Codes,
    choices: Codes,
    gate_up: Codes,
    down: Codes,
    is_power_of_two: bool,
    dtype: torch.dtype,
) -> Tensor:
    """[R, D]; ``choices``: expert ids [R, k] and their weights. Shapes it lacks run in triton."""
    expert_ids, expert_weights = choices
    num_experts, width, hidden = gate_up[0].shape
    if dtype != torch.bfloat16 or hidden % GROUP or (width // 2) % GROUP:
        return portable.moe_fp8(x, choices, gate_up, down, is_power_of_two, dtype)
    if expert_ids.numel() == 0:
        return torch.zeros((x[0].shape[0], hidden), dtype=dtype, device=x[0].device)
    rows = sorted_rows(expert_ids, num_experts)
    out = torch.empty((len(rows.source), hidden), dtype=dtype, device=x[0].device)
    for start in range(0, len(rows.source), CHUNK):
        part = slice(start, start + CHUNK)
        source, experts = rows.source[part], rows.expert[part]
        codes = x[0].view(torch.uint8).index_select(0, source).view(torch.float8_e4m3fn)
        inner = torch.empty((len(source), width), dtype=dtype, device=codes.device)
        library.m_grouped_fp8_gemm_nt_contiguous(
            (codes, x[1].index_select(0, source)), gate_up, inner, experts, disable_ue8m0_cast=True
        )
        library.m_grouped_fp8_gemm_nt_contiguous(
            _silu_quantise(inner, is_power_of_two), down, out[part], experts,
            disable_ue8m0_cast=True,
        )  # fmt: skip
    return _mixed(out, rows.place, expert_ids, expert_weights)


def _silu_quantise(inner: Tensor, is_power_of_two: bool) -> Codes:
    if inner.is_cuda:
        from gnomon.attention.providers.triton.linear_quantise import silu_quantise

        return silu_quantise(inner, is_power_of_two)
    return plain_silu_quantise(inner, is_power_of_two)


def _mixed(out: Tensor, place: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Σ_j weights[r, j] · out[place of (r, j)] in fp32; nothing is read for an id of −1."""
    if out.is_cuda:
        from gnomon.attention.providers.external.launches import mixed_rows

        return mixed_rows(out, place.view(ids.shape), ids, weights)
    picked = out.index_select(0, place).view(*ids.shape, -1).to(torch.float32)
    picked = picked.masked_fill((ids < 0)[..., None], 0)
    mixed: Tensor = (picked * weights.to(torch.float32)[..., None]).sum(1).to(out.dtype)
    return mixed


def kernel_of(library: GroupedProducts) -> Any:
    """The function that runs moe_fp8 by its spec's arguments."""

    def run(
        x: Codes,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Codes,
        down: Codes,
        is_power_of_two: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        choices = expert_ids, expert_weights
        return moe_fp8(library, x, choices, gate_up, down, is_power_of_two, dtype)

    return run
