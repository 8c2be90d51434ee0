"""Specs of attention proper: sparse_mla, dense_mha, lse_merge. Maths: oracle_math.md §1.2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from gnomon.attention.providers import reference
from gnomon.attention.spec.draw import normal, plain_pool, slot_lists
from gnomon.attention.spec.model import (
    ROUND_ONCE,
    UNIT_SUM,
    Argument,
    Arguments,
    Case,
    OpSpec,
    Scale,
    Tolerance,
    by_dtype,
    num_bytes,
)

HALF_OUT = Tolerance(1e-4, 2.0**-8, ROUND_ONCE.reason)
WEIGHTS_ROUNDED = Tolerance(
    2.0**-8,
    2.0**-8,
    "softmax weights are rounded to the values' dtype before they meet values of unit scale, as on "
    "every tensor core: half an ulp, 2^-9 of each, adds up at random",
)
_SCALE = Argument("scale", "", "float")


def _sparse_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    dims, size = scale.dims, scale.page_size
    rank, rope_dim, width = dims.kv_lora_rank, dims.qk_rope_head_dim, dims.index_topk
    pool = plain_pool(generator, scale.num_keys // size + 2, size, rank + rope_dim, dtype)
    edge = [0, 1, width - 1, width, 0, 2]
    plans = {
        "full lists": [width] * scale.num_rows,
        "counts 0, 1, K between others": (edge * scale.num_rows)[: scale.num_rows],
        "one row": [width],
        "one row of one key": [1],
        "only padding": [0, 0, 0],
        "no rows": [],
    }
    for label, counts in plans.items():
        q = normal(generator, (len(counts), dims.num_heads, rank), dtype)
        q_rope = normal(generator, (len(counts), dims.num_heads, rope_dim), dtype)
        slots, count = slot_lists(generator, counts, width, pool.num_slots)
        yield Case(label, (q, q_rope, pool, slots, count, (rank + rope_dim) ** -0.5))
    counts = [width] * 3
    q, q_rope = (normal(generator, (3, dims.num_heads, n), dtype) for n in (rank, rope_dim))
    slots, count = slot_lists(generator, counts, width, pool.num_slots)
    alike = pool.typed()[slots[:, 0]][:, None].expand(-1, dims.num_heads, -1)
    winners = alike[..., :rank].contiguous(), alike[..., rank:].contiguous()
    yield Case("one key takes all", (*winners, pool, slots, count, 8.0))
    unread = torch.ones(pool.num_slots, dtype=torch.bool)
    unread[slots.flatten()] = False
    tainted = plain_pool(generator, pool.num_pages, size, rank + rope_dim, dtype)
    tainted.typed()[unread] = math.nan
    yield Case("NaN beside the listed keys", (q, q_rope, tainted, slots, count, 0.2))


def _dense_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    dims = scale.dims
    heads, dim = dims.num_heads, dims.qk_nope_head_dim + dims.qk_rope_head_dim
    plans = {
        "causal": (scale.num_rows, scale.num_rows, 1),
        "causal behind a context": (scale.num_rows, scale.num_keys, None),
        "one row": (1, scale.num_keys, None),
        "many rows": (4 * scale.num_rows + 1, 4 * scale.num_rows + 1, 1),
        "no rows": (0, 5, None),
        "no keys": (3, 0, None),
    }
    for label, (num_rows, num_keys, first) in plans.items():
        q = normal(generator, (num_rows, heads, dim), dtype)
        k = normal(generator, (num_keys, heads, dim), dtype)
        v = normal(generator, (num_keys, heads, dims.v_head_dim), dtype)
        start = max(0, num_keys - num_rows + 1) if first is None else first
        visible = torch.arange(start, start + num_rows, dtype=torch.int32).clamp_max(num_keys)
        yield Case(label, (q, k, v, visible, dim**-0.5))
        if num_rows > 3:
            gaps = visible.masked_fill(torch.arange(num_rows) % 4 == 1, 0)
            yield Case(f"{label}, rows that see nothing", (q, k, v, gaps, dim**-0.5))


def _merge_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    shape = (scale.num_rows, scale.dims.num_heads)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    outs = [normal(generator, (*shape, scale.dims.v_head_dim), dtype) for _ in range(2)]
    lses = [normal(generator, shape, wide) for _ in range(2)]
    empty = torch.zeros_like(outs[0]), torch.full_like(lses[0], -math.inf)
    yield Case("typical", (outs[0], lses[0], outs[1], lses[1]))
    yield Case("far apart", (outs[0], lses[0] + 500, outs[1], lses[1] - 500))
    yield Case("right is empty", (outs[0], lses[0], *empty))
    yield Case("left is empty", (*empty, outs[1], lses[1]))
    yield Case("both are empty", (*empty, *empty))
    yield Case("no rows", (outs[0][:0], lses[0][:0], outs[1][:0], lses[1][:0]))


def _observe(_: Arguments, result: Any) -> Mapping[str, Tensor]:
    return {"out": result[0], "lse": result[1]}


def _sparse_flops(arguments: Arguments) -> int:
    q, q_rope, _, _, count, _ = arguments
    per_key = 2 * int(q.shape[1]) * (2 * int(q.shape[2]) + int(q_rope.shape[2]))
    return per_key * int(count.sum())


def _sparse_bytes(arguments: Arguments) -> int:
    q, q_rope, pool, slots, count, _ = arguments
    unique = int(slots[slots >= 0].unique().numel())
    entries = int(pool.layout.bytes_per_token) * unique
    return 2 * num_bytes(q) + num_bytes(q_rope) + entries + 4 * int(count.sum())


def _dense_flops(arguments: Arguments) -> int:
    q, _, v, visible, _ = arguments
    return 2 * int(q.shape[1]) * (int(q.shape[2]) + int(v.shape[2])) * int(visible.sum())


SPARSE_MLA = OpSpec(
    name="sparse_mla",
    summary="absorbed MLA of every row over its own list of slots",
    arguments=(
        Argument("q_latent", "[R, H, D_c]", "any float"),
        Argument("q_rope", "[R, H, D_r]", "any float"),
        Argument("pool", "[pages * P, D_c + D_r]", "a layout's"),
        Argument("slots", "[R, W]", "int64 or int32"),
        Argument("count", "[R]", "int32"),
        _SCALE,
    ),
    constraints=(
        "the first count[r] slots are valid, −1 behind",
        "values are the first D_c columns",
        "a row without keys gives 0 and −inf",
        "a row's bits in fp32 depend on that row alone",
    ),
    reference=reference.sparse_mla,
    cases=_sparse_cases,
    observe=_observe,
    tolerances=by_dtype(UNIT_SUM, WEIGHTS_ROUNDED),
    flops=_sparse_flops,
    min_bytes=_sparse_bytes,
)

DENSE_MHA = OpSpec(
    name="dense_mha",
    summary="attention of row m over the first visible[m] keys, all heads their own keys",
    arguments=(
        Argument("q", "[M, H, D]", "any float"),
        Argument("k", "[N, H, D]", "any float"),
        Argument("v", "[N, H, Dv]", "any float"),
        Argument("visible", "[M]", "int32"),
        _SCALE,
    ),
    constraints=("0 <= visible[m] <= N", "a row that sees nothing gives 0 and −inf"),
    reference=reference.dense_mha,
    cases=_dense_cases,
    observe=_observe,
    tolerances=by_dtype(UNIT_SUM, WEIGHTS_ROUNDED),
    flops=_dense_flops,
    min_bytes=lambda arguments: num_bytes(*arguments[:3]) + num_bytes(arguments[0]),
)

LSE_MERGE = OpSpec(
    name="lse_merge",
    summary="join two partial attentions over disjoint keys",
    arguments=(
        Argument("out_a", "[..., D]", "any float"),
        Argument("lse_a", "[...]", "fp32 or fp64"),
        Argument("out_b", "[..., D]", "any float"),
        Argument("lse_b", "[...]", "fp32 or fp64"),
    ),
    constraints=("(0, −inf) is the identity",),
    reference=reference.lse_merge,
    cases=_merge_cases,
    observe=_observe,
    tolerances=by_dtype(UNIT_SUM, HALF_OUT),
    flops=lambda arguments: 3 * int(arguments[0].numel()),
    min_bytes=lambda arguments: num_bytes(*arguments) + num_bytes(*arguments[:2]),
)

SPECS = (SPARSE_MLA, DENSE_MHA, LSE_MERGE)
