"""Recomputation of what writers of the cache wrote, and of what readers read.

In:  a call's arguments and results, the rows to look at. Out: faults. The reference provider
writes the rows into a scratch pool of the same layout; what both pools give back is compared, so
that the layout's own rounding is part of both (and of the bound, where a scale may tip over).
Maths: oracle_math.md §1.2–1.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gnomon.attention.checks.compare import rounding, sum_error, value_fault
from gnomon.attention.checks.effort import Effort
from gnomon.attention.checks.faults import Faults
from gnomon.attention.checks.recheck_rows import rope_at
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.providers import reference
from gnomon.attention.spec.model import Arguments


def recheck_latent_write(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Write the rows again, elsewhere."""
    kv, weight, eps, turns, pool, slots = arguments
    scratch, places = _scratch(pool, len(rows))
    reference.latent_write(kv[rows], weight, eps, rope_at(turns, rows), scratch, places)
    yield from _written(rows, pool, slots[rows], (scratch, places))


def recheck_index_prepare(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Prepare the rows' queries again, and write the keys of as many rows again, elsewhere."""
    q, k, transform, turns, pool, slots = arguments
    writing = (slots >= 0).nonzero()[:, 0].tolist()
    chosen = rows or range(effort.rows)  # a step of no sparse rows writes keys all the same
    keys = sorted({writing[place % len(writing)] for place in chosen}) if writing else []
    scratch, places = _scratch(pool, len(keys))
    both = rope_at(turns[0], rows), rope_at(turns[1], keys)
    part = q[rows].double()
    query = reference.index_prepare(part, k[keys], transform, both, scratch, places)
    length = part.norm(dim=-1, keepdim=True)
    found = results["query"][rows]
    error = sum_error(q.dtype) * length + rounding(found.dtype) * query.abs()
    if pool.layout.rounds_queries:
        error = error + 4 * pool.layout.round_trip_bound(query)
    yield from value_fault("query", rows, found, query, error)
    for fault in _written(keys, pool, slots[keys], (scratch, places)):
        yield replace(fault, is_of_writes=True)


def recheck_context_gather(
    arguments: Arguments, results: Mapping[str, Tensor], rows: list[int], effort: Effort
) -> Faults:
    """Read some of the entries again, one slot after the other."""
    pool, pages, start, _ = arguments
    position = torch.tensor(rows, device=pages.device) + start
    slots = pages.long()[position // pool.page_size] * pool.page_size + position % pool.page_size
    expected = pool.layout.gather(pool, slots).double()
    yield from value_fault("entries", rows, results["out"][rows], expected, 0.0)


def _scratch(pool: PagedPool, num_rows: int) -> tuple[PagedPool, Tensor]:
    """A pool of the same layout with room for so many rows, and their slots."""
    num_pages = 1 + -(-num_rows // pool.page_size)
    scratch = pool.layout.allocate(num_pages, pool.page_size, pool.device)
    return scratch, torch.arange(num_rows, device=pool.device) + pool.page_size


def _written(
    rows: list[int], pool: PagedPool, slots: Tensor, truth: tuple[PagedPool, Tensor]
) -> Faults:
    if not rows:
        return
    expected = truth[0].layout.gather(*truth).double()
    found = pool.layout.gather(pool, slots)
    length = expected.norm(dim=-1, keepdim=True)
    allowed = sum_error(found.dtype) * length + rounding(found.dtype) * expected.abs()
    allowed = allowed + 4 * pool.layout.round_trip_bound(expected)
    yield from value_fault("the entry written", rows, found, expected, allowed)
