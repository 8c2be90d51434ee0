"""Arguments of operators at real sizes, made on the device that runs them.

In:  sizes, dtypes and layout ids as spec.SPECS names them, a seeded generator of the device.
Out: the positional arguments of one kernel call. Caches hold random entries written through their
     layout; index lists are ascending and distinct, as the selection makes them.
Not here: which sizes (op_cells.py); FP8 products (op_inputs_fp8.py); edge cases (attention/spec).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis, spans_of
from gnomon.attention.layouts import IndexKeyDims, LatentDims, choose_layout
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import IndexTransform, RopeRows, RopeTable
from gnomon.attention.spec.model import Arguments

PAGE = 64
CHOSEN = 8  # experts of a row
WRITE_ROWS = 1 << 16  # entries written at once
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Material:
    """Where and what to draw: a device, its seeded generator, the compute dtype."""

    device: torch.device
    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers."""
        drawn = torch.randn(*shape, generator=self.generator, device=self.device)
        return drawn.to(dtype or self.dtype)

    def pool(self, layout_id: str, dims: LatentDims | IndexKeyDims, num_slots: int) -> PagedPool:
        """A pool of random entries in at least ``num_slots`` slots behind the null page."""
        layout = choose_layout(layout_id, dims, self.dtype)
        pool = layout.allocate(-(-num_slots // PAGE) + 1, PAGE, self.device)
        for start in range(0, pool.num_slots, WRITE_ROWS):
            slots = torch.arange(start, min(start + WRITE_ROWS, pool.num_slots), device=self.device)
            layout.write(pool, slots, self.normal(len(slots), layout.dim))
        return pool

    def lists(self, num_rows: int, width: int, num_keys: int) -> Tensor:
        """Ascending distinct ids [num_rows, width] int64 below ``num_keys``."""
        parts = []
        for start in range(0, num_rows, 512):
            rows = min(512, num_rows - start)
            noise = torch.rand(rows, num_keys, generator=self.generator, device=self.device)
            parts.append(noise.topk(width, sorted=False).indices.sort(dim=1).values)
        return torch.cat(parts)

    def rope(self, num_rows: int, dim: int, first: int = 0) -> RopeRows:
        """Rotations of positions first .. first + num_rows − 1 of one request."""
        position = torch.arange(first, first + num_rows, dtype=torch.int32)
        request = torch.zeros_like(position)
        spans = spans_of(request.numpy().astype("int64"), position.numpy().astype("int64"))
        place, seen = position.to(self.device), (position + 1).to(self.device)
        axis = RowAxis(request.to(self.device), place, seen, num_rows, spans, "bench")
        frequency = 10000.0 ** (-2.0 * torch.arange(dim // 2, device=self.device) / dim)
        angle = torch.arange(first + num_rows, device=self.device)[:, None] * frequency
        return RopeTable(angle.cos().float(), angle.sin().float()).at(axis, True)


def sparse_mla(
    draw: Material, layout: str, num_rows: int, num_heads: int, num_keys: int, width: int = 2048
) -> Arguments:
    """Rows that each attend ``width`` of ``num_keys`` entries of one pool; V3.2's dims."""
    pool = draw.pool(layout, LatentDims(512, 64), num_keys)
    slots = draw.lists(num_rows, width, num_keys) + PAGE
    count = torch.full((num_rows,), width, dtype=torch.int32, device=draw.device)
    q, q_rope = draw.normal(num_rows, num_heads, 512), draw.normal(num_rows, num_heads, 64)
    return q, q_rope, pool, slots, count, 192**-0.5


def dense_mha(draw: Material, num_rows: int, num_heads: int) -> Arguments:
    """A causal prompt of V3.2's head widths, 192 and 128."""
    q, k = (draw.normal(num_rows, num_heads, 192) for _ in range(2))
    visible = torch.arange(1, num_rows + 1, dtype=torch.int32, device=draw.device)
    return q, k, draw.normal(num_rows, num_heads, 128), visible, 192**-0.5


def index_scores(draw: Material, num_rows: int, num_keys: int, num_heads: int) -> Arguments:
    """The last ``num_rows`` rows of a prompt of ``num_keys``, on numbers that FP8 codes hold."""
    layout = choose_layout("fp8", IndexKeyDims(128), draw.dtype)
    q = layout.round_queries(draw.normal(num_rows, num_heads, 128))
    keys = layout.dequantise(layout.quantise(draw.normal(num_keys, 128)))
    count = torch.arange(num_keys - num_rows + 1, num_keys + 1, device=draw.device)
    scale = (num_heads * 128) ** -0.5
    weights = draw.normal(num_rows, num_heads, dtype=torch.float32)
    return q, weights, keys, count.to(torch.int32), scale


def index_scores_paged(
    draw: Material, num_rows: int, num_keys: int, num_heads: int, layout: str = "fp8"
) -> Arguments:
    """Decode: every row its own request of ``num_keys`` tokens."""
    pool = draw.pool(layout, IndexKeyDims(128), num_rows * num_keys)
    q = pool.layout.round_queries(draw.normal(num_rows, num_heads, 128))
    shuffled = torch.randperm(num_rows * num_keys // PAGE, device=draw.device).to(torch.int32) + 1
    count = torch.full((num_rows,), num_keys, dtype=torch.int32, device=draw.device)
    weights = draw.normal(num_rows, num_heads, dtype=torch.float32)
    pages = shuffled.view(num_rows, num_keys // PAGE)
    return q, weights, pool, pages, count, (num_heads * 128) ** -0.5


def topk(draw: Material, num_rows: int, num_keys: int, k: int = 2048) -> Arguments:
    """Scores of full rows."""
    count = torch.full((num_rows,), num_keys, dtype=torch.int32, device=draw.device)
    return draw.normal(num_rows, num_keys, dtype=torch.float32), count, k


def latent_write(draw: Material, layout: str, num_rows: int) -> Arguments:
    """A prompt's latents, each to its slot."""
    pool = draw.pool(layout, LatentDims(512, 64), num_rows)
    slots = torch.arange(PAGE, PAGE + num_rows, device=draw.device)
    weight = draw.normal(512)
    return draw.normal(num_rows, 576), weight, EPS, draw.rope(num_rows, 64), pool, slots


def index_prepare(draw: Material, num_rows: int, num_heads: int, layout: str = "fp8") -> Arguments:
    """A prompt's index queries and keys."""
    pool = draw.pool(layout, IndexKeyDims(128), num_rows)
    slots = torch.arange(PAGE, PAGE + num_rows, device=draw.device)
    transform = IndexTransform(draw.normal(128), draw.normal(128), EPS, False)
    rows = draw.rope(num_rows, 64)
    q, k = draw.normal(num_rows, num_heads, 128), draw.normal(num_rows, 128)
    return q, k, transform, (rows, rows), pool, slots


def context_gather(draw: Material, layout: str, num_keys: int) -> Arguments:
    """The whole context of one request whose pages lie in any order."""
    pool = draw.pool(layout, LatentDims(512, 64), num_keys)
    pages = torch.randperm(num_keys // PAGE, device=draw.device).to(torch.int32) + 1
    return pool, pages, 0, num_keys


def lse_merge(draw: Material, num_rows: int, num_heads: int) -> Arguments:
    """Two partial results of dense attention."""
    outs = [draw.normal(num_rows, num_heads, 128) for _ in range(2)]
    lses = [draw.normal(num_rows, num_heads, dtype=torch.float32) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


def rms_norm(draw: Material, num_rows: int, width: int) -> Arguments:
    """Hidden states and a norm's weight."""
    return draw.normal(num_rows, width), draw.normal(width), EPS


def layer_norm(draw: Material, num_rows: int, width: int) -> Arguments:
    """Index keys, the norm's weight and bias."""
    return draw.normal(num_rows, width), draw.normal(width), draw.normal(width), EPS


def rope(draw: Material, num_rows: int, num_heads: int) -> Arguments:
    """The rotary part of a prompt's queries."""
    return draw.normal(num_rows, num_heads, 64), draw.rope(num_rows, 64)


def choices(draw: Material, num_rows: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Eight of ``num_experts`` for every row, and equal shares."""
    noise = torch.rand(num_rows, num_experts, generator=draw.generator, device=draw.device)
    ids = noise.topk(CHOSEN).indices
    return ids, torch.full(ids.shape, 1 / CHOSEN, device=draw.device)


def moe(
    draw: Material, num_rows: int, num_experts: int, width: int, hidden: int = 7168
) -> Arguments:
    """Eight of ``num_experts`` for every row; experts in the compute dtype."""
    ids, weights = choices(draw, num_rows, num_experts)
    gate_up = draw.normal(num_experts, 2 * width, hidden) * hidden**-0.5
    down = draw.normal(num_experts, hidden, width) * width**-0.5
    return draw.normal(num_rows, hidden), ids, weights, gate_up, down
