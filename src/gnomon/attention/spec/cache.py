"""Specs of the operators that write and read pools: latent_write, index_prepare, context_gather.

What is observed of a write is every slot of the pool, so that a stray write shows too.
Maths: oracle_math.md §1.2–1.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.ops.values import IndexTransform
from gnomon.attention.providers import reference
from gnomon.attention.spec.draw import normal, page_lists, plain_pool, rope_rows
from gnomon.attention.spec.model import (
    EXACT,
    ROUND_ONCE,
    Argument,
    Arguments,
    Case,
    OpSpec,
    Scale,
    Tolerance,
    by_dtype,
    num_bytes,
)

WRITE = Tolerance(5e-6, 5e-6, "fp32: a norm, a rotation, at most one Hadamard row of 128")
WRITE_HALF = Tolerance(2e-5, 2.0**-8, ROUND_ONCE.reason)
_POOL = Argument("pool", "[pages * P, D]", "a layout's")
_SLOTS = Argument("slots", "[N]", "int64")


def _slots(generator: Generator, num_rows: int, pool: PagedPool) -> Tensor:
    """Distinct slots outside the null page; every fifth row writes nothing."""
    room = pool.num_slots - pool.page_size
    slots = torch.randperm(room, generator=generator)[:num_rows] + pool.page_size
    return torch.where(torch.arange(num_rows) % 5 == 3, -1, slots)


def _everything(pool: PagedPool) -> Tensor:
    return pool.layout.gather(pool, torch.arange(pool.num_slots))


def _latent_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    rank, rope_dim = scale.dims.kv_lora_rank, scale.dims.qk_rope_head_dim
    pages = scale.num_rows // scale.page_size + 3
    weight = normal(generator, (rank,), dtype)
    for label, num_rows in (("typical", scale.num_rows), ("one row", 1), ("no rows", 0)):
        pool = plain_pool(generator, pages, scale.page_size, rank + rope_dim, dtype)
        rows = rope_rows(list(range(3, 3 + num_rows)), rope_dim, True)
        kv = normal(generator, (num_rows, rank + rope_dim), dtype)
        slots = _slots(generator, num_rows, pool)
        yield Case(label, (kv, weight, 1e-6, rows, pool, slots))
        yield Case(f"{label}, writes nothing", (kv, weight, 1e-5, rows, pool, slots * 0 - 1))


def _prepare_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    heads, dim = scale.dims.index_num_heads, scale.dims.index_head_dim
    rope_dim, pages = scale.dims.qk_rope_head_dim, scale.num_rows // scale.page_size + 3
    for num_rows in (scale.num_rows, 1, 0):
        positions = list(range(3, 3 + num_rows))
        for is_interleaved, has_hadamard in ((False, True), (True, False)):
            weight, bias = (normal(generator, (dim,), dtype) for _ in range(2))
            transform = IndexTransform(weight, bias, 1e-6, has_hadamard)
            pool = plain_pool(generator, pages, scale.page_size, dim, dtype)
            rows = rope_rows(positions, rope_dim, is_interleaved)
            q, k = (
                normal(generator, (num_rows, heads, dim), dtype),
                _keys(generator, rows, dim, dtype),
            )
            slots = _slots(generator, num_rows, pool)
            label = f"{num_rows} rows, interleaved {is_interleaved}, Hadamard {has_hadamard}"
            yield Case(label, (q, k, transform, (rows, rows), pool, slots))
            # Under context parallelism the keys of all ranks are written beside a rank's queries.
            some = rope_rows(positions[::2], rope_dim, is_interleaved)
            yield Case(f"{label}, fewer queries", (q[::2], k, transform, (some, rows), pool, slots))


def _keys(generator: Generator, rows: Any, dim: int, dtype: torch.dtype) -> Tensor:
    return normal(generator, (rows.axis.num_rows, dim), dtype) + 0.25


def _gather_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    dim = scale.dims.kv_lora_rank + scale.dims.qk_rope_head_dim
    pages, num_pages = page_lists(generator, [scale.num_keys], scale.page_size)
    pool = plain_pool(generator, num_pages, scale.page_size, dim, dtype)
    spans = ((0, scale.num_keys), (3, scale.num_keys - 5), (scale.num_keys - 1, 1), (4, 0))
    for start, length in spans:
        yield Case(f"{length} entries from {start}", (pool, pages[0], start, length))


def _observe_latent(arguments: Arguments, _: Any) -> Mapping[str, Tensor]:
    return {"pool": _everything(arguments[4])}


def _observe_prepare(arguments: Arguments, result: Any) -> Mapping[str, Tensor]:
    return {"query": result, "pool": _everything(arguments[4])}


LATENT_WRITE = OpSpec(
    name="latent_write",
    summary="write [rms_norm(c) | rope(kr)] of every row to its slot",
    arguments=(
        Argument("kv", "[N, D_c + D_r]", "any float"),
        Argument("norm_weight", "[D_c]", "any float"),
        Argument("eps", "", "float"),
        Argument("rope", "N rotations over D_r columns, interleaved", "fp32"),
        _POOL,
        _SLOTS,
    ),
    constraints=("slot −1 writes nothing", "no slot is named twice", "kr is not normalised"),
    reference=reference.latent_write,
    cases=_latent_cases,
    observe=_observe_latent,
    tolerances=by_dtype(WRITE, WRITE_HALF),
    flops=lambda arguments: 4 * int(arguments[0].numel()),
    min_bytes=lambda arguments: 2 * num_bytes(arguments[0]),
)

INDEX_PREPARE = OpSpec(
    name="index_prepare",
    summary="norm the index keys, rotate keys and queries, Hadamard both, write the keys",
    arguments=(
        Argument("q", "[R, Hi, Di]", "any float"),
        Argument("k", "[N, Di]", "any float"),
        Argument("transform", "norm [Di], whether Hadamard", ""),
        Argument("rope", "rotations of the R and of the N rows", "fp32"),
        _POOL,
        _SLOTS,
    ),
    constraints=(
        "Di is a power of two if Hadamard",
        "slot −1 writes nothing",
        "queries are rounded as keys are where the pool's layout says so (rounds_queries)",
    ),
    reference=reference.index_prepare,
    cases=_prepare_cases,
    observe=_observe_prepare,
    tolerances=by_dtype(WRITE, WRITE_HALF),
    flops=lambda arguments: 8 * int(arguments[0].numel() + arguments[1].numel()),
    min_bytes=lambda arguments: 2 * num_bytes(arguments[0], arguments[1]),
)


def _gathered_bytes(layout: KVLayout) -> int:
    """Bytes read and written for one entry: packed as stored, then as the values it holds."""
    return layout.bytes_per_token + layout.dim * layout.computed_dtype.itemsize


CONTEXT_GATHER = OpSpec(
    name="context_gather",
    summary="entries start .. start + length − 1 of one request, in order",
    arguments=(
        _POOL,
        Argument("pages", "[P]", "int32"),
        Argument("start", "", "int"),
        Argument("length", "", "int"),
    ),
    constraints=("start + length is within the request's pages",),
    reference=reference.context_gather,
    cases=_gather_cases,
    observe=lambda _, result: {"out": result},
    tolerances=by_dtype(EXACT, EXACT),
    flops=lambda _: 0,
    min_bytes=lambda arguments: arguments[3] * _gathered_bytes(arguments[0].layout),
    exact=frozenset({"out"}),
)

SPECS = (LATENT_WRITE, INDEX_PREPARE, CONTEXT_GATHER)
