"""Builds small steps with filled pools for the operators' tests.

In:  query and kv lengths of the requests, sizes, a byte budget. Out: geometry, plan and random
pools, queries on the plan's sparse rows. Everything is drawn from one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.geometry import Geometry, RowTensor, build_geometry
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import Budget, StepPlan, plan_step
from gnomon.attention.providers import builtin_providers
from gnomon.attention.routes import AttentionDims, DensePolicy, RoutePolicy
from gnomon.attention.transforms import pad_rows

DIMS = AttentionDims(
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_topk=8,
    index_num_heads=16,
    index_head_dim=16,
)
NEVER_DENSE = RoutePolicy(DensePolicy.NEVER)


def operators(
    provider: str = "torch", dtype: torch.dtype = torch.float32, *, is_deterministic: bool = False
) -> Operators:
    """All operators of one provider."""
    need = OpNeed(dtype=dtype, is_deterministic=is_deterministic)
    return bind_operators(need, builtin_providers(), provider)[0]


@dataclass(frozen=True, slots=True)
class SmallStep:
    """A step, its pools, and index and attention queries on its sparse rows."""

    geometry: Geometry
    plan: StepPlan
    latents: PagedPool
    index_keys: PagedPool
    index_query: RowTensor
    head_weights: RowTensor
    q_latent: RowTensor
    q_rope: RowTensor

    def rows_of_request(self, request: int) -> Tensor:
        """Row numbers of a request, ascending by position."""
        return (self.index_query.axis.request == request).nonzero()[:, 0]

    def keys_of(self, pool: PagedPool, request: int) -> Tensor:
        """All entries of a request in ``pool``, by the page table written out."""
        table = self.geometry.tables["tokens"]
        length = self.geometry.requests.host.kv_len[request]
        slots = [
            int(table.pages[request, position // table.page_size]) * table.page_size
            + position % table.page_size
            for position in range(length)
        ]
        return pool.typed()[slots]


def small_step(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    seed: int = 0,
    page_size: int = 4,
    dims: AttentionDims = DIMS,
    budget: Budget | None = None,
    num_rows: int | None = None,
) -> SmallStep:
    """Requests with shuffled pages; the step is padded to ``num_rows`` rows if given."""
    generator = torch.Generator().manual_seed(seed)
    needs = [-(-length // page_size) for length in kv_lens]
    shuffled = (torch.randperm(sum(needs), generator=generator) + 1).tolist()
    pages, start = [], 0
    for need in needs:
        pages.append(shuffled[start : start + need])
        start += need
    geometry = build_geometry(query_lens, kv_lens, {"tokens": pages}, page_size)
    if num_rows is not None:
        geometry = pad_rows(geometry, num_rows)
    plan = plan_step(geometry, dims, budget=budget, policy=NEVER_DENSE)
    assert plan.sparse is not None
    axis = plan.sparse.axis

    def filled(dim: int) -> PagedPool:
        pool = PlainLayout(torch.float32, dim).allocate(sum(needs) + 1, page_size)
        pool.typed().copy_(torch.randn(pool.num_slots, dim, generator=generator))
        return pool

    def rows(*shape: int) -> RowTensor:
        return RowTensor(axis, torch.randn(axis.num_rows, *shape, generator=generator))

    return SmallStep(
        geometry,
        plan,
        filled(dims.kv_lora_rank + dims.qk_rope_head_dim),
        filled(dims.index_head_dim),
        rows(dims.index_num_heads, dims.index_head_dim),
        rows(dims.index_num_heads),
        rows(dims.num_heads, dims.kv_lora_rank),
        rows(dims.num_heads, dims.qk_rope_head_dim),
    )
