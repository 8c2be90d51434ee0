"""Specs of the indexer's operators: index_scores, index_scores_paged, topk.

Maths: oracle_math.md §1.5; ties and NaN: design.md §5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from gnomon.attention.providers import reference
from gnomon.attention.spec.draw import integers, normal, page_lists, plain_pool
from gnomon.attention.spec.model import (
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

HALF_INPUTS = Tolerance(1e-5, 1e-5, "half inputs are exact in fp32, and scores stay fp32")
_Q = Argument("q", "[M, Hi, Di]", "any float")
_WEIGHTS = Argument("weights", "[M, Hi]", "any float")
_COUNT = Argument("count", "[M]", "int32")
_SCALE = Argument("scale", "", "float")
_RULES = ("columns from count[m] on are −inf", "scores are fp32, fp64 for fp64 queries")


def _counts(num_rows: int, most: int) -> list[int]:
    """Ascending as in a prefill, with a padding row in the middle and both ends present."""
    counts = [1 + row * (most - 1) // max(1, num_rows - 1) for row in range(num_rows)]
    if num_rows > 2:
        counts[num_rows // 2] = 0
    return counts


def _queries(
    generator: Generator, num_rows: int, dtype: torch.dtype, scale: Scale
) -> tuple[Tensor, Tensor, float]:
    heads, dim = scale.dims.index_num_heads, scale.dims.index_head_dim
    q = normal(generator, (num_rows, heads, dim), dtype)
    return q, normal(generator, (num_rows, heads), dtype), (heads * dim) ** -0.5


def _score_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    dim, most = scale.dims.index_head_dim, scale.num_keys
    for num_rows, num_keys in ((scale.num_rows, most), (1, most), (5, 1), (0, most), (3, 0)):
        q, weights, factor = _queries(generator, num_rows, dtype, scale)
        keys = normal(generator, (num_keys, dim), dtype)
        count = torch.tensor(_counts(num_rows, num_keys), dtype=torch.int32).clamp_max(num_keys)
        label = f"{num_rows} rows, {num_keys} keys"
        yield Case(label, (q, weights, keys, count, factor))
        full = torch.full_like(count, num_keys)
        yield Case(f"{label}, all visible", (q, weights, keys, full, factor))


def _paged_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    dim, size = scale.dims.index_head_dim, scale.page_size
    for num_rows in (scale.num_rows, 1, 0):
        q, weights, factor = _queries(generator, num_rows, dtype, scale)
        counts = _counts(num_rows, scale.num_keys)
        pages, num_pages = page_lists(generator, counts, size)
        pool = plain_pool(generator, num_pages, size, dim, dtype)
        pool.typed()[:size] = torch.nan  # nothing may come from the null page
        count = torch.tensor(counts, dtype=torch.int32)
        yield Case(f"{num_rows} rows", (q, weights, pool, pages, count, factor))


def _topk_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    num_rows, num_keys, k = scale.num_rows, scale.num_keys, scale.dims.index_topk
    distinct = normal(generator, (num_rows, num_keys), wide)
    tied = integers(generator, -2, 3, (num_rows, num_keys)).to(wide)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0], dtype=wide)
    strange = special[integers(generator, 0, 6, (num_rows, num_keys))]
    ragged = torch.tensor(_counts(num_rows, num_keys), dtype=torch.int32)
    edge = torch.tensor([0, 1, k - 1, k, k + 1, num_keys], dtype=torch.int32)
    edge = edge.repeat(num_rows // 6 + 1)[:num_rows]
    for label, scores in (("distinct", distinct), ("ties", tied), ("NaN, ±inf, ±0", strange)):
        for kind, count in (("ragged", ragged), ("counts at the edge", edge)):
            hidden = torch.arange(num_keys) >= count[:, None]
            rows = scores.masked_fill(hidden, -math.inf)
            yield Case(f"{label}, {kind}", (rows, count, k, True))
        few = torch.full((num_rows,), k, dtype=torch.int32)
        yield Case(f"{label}, k columns", (scores[:, :k], few, k, True))
        yield Case(f"{label}, fewer columns", (scores[:, : k // 2], few // 2, k, True))
    equal, whole = torch.zeros(2, num_keys, dtype=wide), torch.tensor([num_keys, k + 1])
    equal[1, k + 1 :] = -math.inf
    yield Case("all equal", (equal, whole.to(torch.int32), k, True))
    yield Case("no rows", (distinct[:0], ragged[:0], k, True))


def _observe_topk(_: Arguments, result: Any) -> Mapping[str, Tensor]:
    return {
        "ids": result.ids,
        "count": result.count,
        "nan_rows": result.nan_rows,
        "margin": result.margin,
    }


def _score_flops(arguments: Arguments) -> int:
    q, count = arguments[0], arguments[-2]
    return 2 * int(q.shape[1]) * (int(q.shape[2]) + 1) * int(count.sum())


def _paged_bytes(arguments: Arguments) -> int:
    q, weights, pool, _, count, _ = arguments
    per_key = int(pool.layout.bytes_per_token) + 4
    return num_bytes(q, weights) + per_key * int(count.sum())


INDEX_SCORES = OpSpec(
    name="index_scores",
    summary="scale · Σ_h weights[m, h] · relu(q[m, h] · keys[n]) for the keys of one request",
    arguments=(_Q, _WEIGHTS, Argument("keys", "[N, Di]", "any float"), _COUNT, _SCALE),
    constraints=_RULES,
    reference=reference.index_scores,
    cases=_score_cases,
    observe=lambda _, result: {"scores": result},
    tolerances=by_dtype(UNIT_SUM, HALF_INPUTS),
    flops=_score_flops,
    min_bytes=lambda arguments: num_bytes(*arguments[:3]) + 4 * int(arguments[3].sum()),
)

INDEX_SCORES_PAGED = OpSpec(
    name="index_scores_paged",
    summary="index_scores where every row has keys and pages of its own",
    arguments=(
        _Q,
        _WEIGHTS,
        Argument("pool", "[pages * P, Di]", "a layout's"),
        Argument("pages", "[M, pages]", "int32"),
        _COUNT,
        _SCALE,
    ),
    constraints=(*_RULES, "pages hold every entry below count[m]; behind them, 0"),
    reference=reference.index_scores_paged,
    cases=_paged_cases,
    observe=lambda _, result: {"scores": result},
    tolerances=by_dtype(UNIT_SUM, HALF_INPUTS),
    flops=_score_flops,
    min_bytes=_paged_bytes,
)

TOPK = OpSpec(
    name="topk",
    summary="the exact k best of the first count[m] columns, ids ascending, −1 behind",
    arguments=(
        Argument("scores", "[M, N]", "fp32 or fp64"),
        _COUNT,
        Argument("k", "", "int"),
        Argument("want_margin", "", "bool"),
    ),
    constraints=(
        "columns from count[m] on hold −inf",
        "higher score first, ties to the lower column; −0 equals 0",
        "NaN counts as −inf and raises the row's flag",
        "margin: k-th minus (k+1)-th score, 0 for equal ones, +inf where nothing was cut",
    ),
    reference=reference.topk,
    cases=_topk_cases,
    observe=_observe_topk,
    tolerances=by_dtype(
        Tolerance(0.0, 1e-6, "the margin is one fp32 subtraction"),
        Tolerance(0.0, 1e-6, "scores are fp32 whatever the compute dtype"),
    ),
    flops=lambda _: 0,
    min_bytes=lambda arguments: num_bytes(arguments[0]) + 4 * arguments[0].shape[0] * arguments[2],
    exact=frozenset({"ids", "count", "nan_rows"}),
)

SPECS = (INDEX_SCORES, INDEX_SCORES_PAGED, TOPK)
