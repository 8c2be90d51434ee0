"""Prefill by way of an unpacked workspace = prefill over the packed pool."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Generator

from gnomon.attention.dispatch import KernelSet, OpNeed, Requirement, bind_operators
from gnomon.attention.geometry import Geometry, build_geometry
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.ops import workspace
from gnomon.attention.ops.attend import SparseMlaKernel, attend_key_set, attend_values
from gnomon.attention.ops.workspace import UnpackedMla, move_slots, num_entries
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.routes import AttentionDims
from gnomon.attention.spec.draw import normal

PAGE, RANK, ROPE, HEADS, WIDTH = 4, 64, 32, 3, 7
KERNELS = torch_provider.PROVIDER.kernels
UNPACKED = UnpackedMla(KERNELS["sparse_mla"], KERNELS["context_gather"], move_slots)
# A request in its first chunk, two that go on, whose first two pages are one and the same.
QUERY, KV = [5, 3, 9], [5, 30, 21]
PAGES = [[7, 3], [2, 9, 12, 4, 5, 14, 1, 6], [2, 9, 15, 10, 8, 11]]


def never(*_: Any) -> Any:
    raise AssertionError("the lse was asked for")


def _geometry() -> Geometry:
    return build_geometry(QUERY, KV, {"tokens": PAGES}, page_size=PAGE)


def _lists(geometry: Geometry, generator: Generator) -> KeySet:
    rows = geometry.rows
    ids = torch.full((rows.num_rows, WIDTH), -1, dtype=torch.int32)
    count = rows.kv_len.clamp_max(WIDTH)
    for row, (length, held) in enumerate(zip(rows.kv_len.tolist(), count.tolist(), strict=True)):
        chosen = torch.randperm(length, generator=generator)[:held].sort().values
        ids[row, :held] = chosen.to(torch.int32)
    return KeySet(rows, (ListSegment("tokens", Space.POSITION, ids, count),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacked_rows_see_the_packed_pools_values(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "FEWEST_ROWS", 1)
    generator, geometry = Generator().manual_seed(3), _geometry()
    layout = Fp8LatentLayout(RANK, ROPE).computing_in(dtype)
    pool = layout.allocate(16, PAGE)
    layout.write(pool, torch.arange(16 * PAGE), normal(generator, (16 * PAGE, RANK + ROPE), dtype))
    num_rows = geometry.rows.num_rows
    queries = tuple(normal(generator, (num_rows, HEADS, n), dtype) for n in (RANK, ROPE))
    keys, table = _lists(geometry, generator), geometry.tables["tokens"]
    attend = partial(attend_key_set, KERNELS, queries, pool, keys, table, 0.1)
    assert UNPACKED.pays(pool, geometry.rows)
    expected, found = attend(), attend(UNPACKED)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    values = partial(attend_values, KERNELS, queries, pool, keys, table, 0.1)
    assert torch.equal(values(), expected[0])
    alone = SparseMlaKernel(never, lambda *given: KERNELS["sparse_mla"](*given)[0])
    assert torch.equal(values(replace(UNPACKED, attend=alone)), expected[0])


def test_lengths_are_those_of_the_requests() -> None:
    assert num_entries(_geometry().rows) == dict(enumerate(KV))


def test_few_rows_large_contexts_and_plain_pools_stay_as_they_are() -> None:
    rows = _geometry().rows
    packed = Fp8LatentLayout(RANK, ROPE).allocate(16, PAGE)
    assert not UNPACKED.pays(packed, rows)  # 17 rows: a decode step's work
    many = build_geometry([400], [400], {"tokens": [list(range(1, 101))]}, page_size=PAGE).rows
    assert UNPACKED.pays(packed, many)
    late = build_geometry([300], [300 * 40], {"tokens": [[1] * 3000]}, page_size=PAGE).rows
    assert not UNPACKED.pays(packed, late)  # 300 rows do not pay for 12,000 entries
    plain = UNPACKED.workspace(packed, rows, _geometry().tables["tokens"]).pool
    assert not UNPACKED.pays(plain, many)


def test_minus_one_stays() -> None:
    slots = torch.tensor([[9, -1], [4, -1]])
    page_map = torch.tensor([99, 1, 0], dtype=torch.int32)
    assert move_slots(slots, page_map, PAGE).tolist() == [[1, -1], [4, -1]]


@pytest.mark.parametrize(
    ("phase", "layout", "dtype", "is_bound"),
    [
        ("prefill", "fp8_ds_mla_656", torch.bfloat16, True),
        ("decode", "fp8_ds_mla_656", torch.bfloat16, False),
        ("prefill", "bf16_576", torch.bfloat16, False),
        ("prefill", "fp8_ds_mla_656", torch.float32, False),
    ],
)
def test_only_prefill_over_packed_latents_binds_it(
    phase: str, layout: str, dtype: torch.dtype, is_bound: bool
) -> None:
    everything = KernelSet("all", 1, KERNELS, Requirement())
    dims = AttentionDims(16, 512, 128, 64, 128, 64, 16, 128)
    need = OpNeed(device="cuda", dtype=dtype, dims=dims, latent_layout=layout, phase=phase)
    operators, _ = bind_operators(need, [everything])
    assert (operators.unpacked is not None) is is_bound
