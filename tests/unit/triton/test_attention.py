"""Attention kernels, interpreted, against the specs; packed pools, views, splits, fixed bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.providers import reference
from gnomon.attention.providers.triton import attention, attention_sparse
from gnomon.attention.providers.triton.attention_sparse import ListCall, Splits
from gnomon.attention.providers.triton.attention_tiles import ListTile
from gnomon.attention.spec import SPECS
from gnomon.attention.spec.check import check_provider
from gnomon.attention.spec.draw import slot_lists
from gnomon.attention.spec.model import Scale
from gnomon.errors import UnsupportedError

# The interpreter takes the bounds of a loop from arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

PROVIDER = KernelSet("triton", 20, attention.KERNELS)
FIXED = KernelSet("triton fixed", 20, attention.FIXED)
HALF_TILE = ListTile(16, 16, 4, 1)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Kernel = Callable[..., tuple[Tensor, Tensor]]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("op", ["sparse_mla", "dense_mha", "lse_merge"])
def test_every_case_of_the_specs(op: str, dtype: torch.dtype) -> None:
    scale = Scale(num_rows=7, num_keys=40)
    cases = SPECS[op].cases(Generator().manual_seed(1), dtype, scale)
    results = [check_provider(SPECS[op], PROVIDER, case, dtype) for case in cases]
    assert [r for r in results if not r.is_ok] == []


def test_the_fixed_kernel_meets_the_spec() -> None:
    cases = SPECS["sparse_mla"].cases(Generator().manual_seed(2), F32, Scale(num_rows=5))
    results = [check_provider(SPECS["sparse_mla"], FIXED, case, F32) for case in cases]
    assert [r for r in results if not r.is_ok] == []


def draw(
    layout: KVLayout, shape: tuple[int, int, int], counts: list[int], dtype: torch.dtype,
    gap: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of sparse_mla over a filled pool of 12 pages of 8; shape (heads, D_c, D_r)."""
    generator = Generator().manual_seed(7)
    heads, rank, rope = shape
    stride = layout.page_bytes(8) + gap
    pool = layout.allocate(12, 8, page_stride_bytes=stride)
    values = torch.randn(pool.num_slots, layout.dim, generator=generator)
    layout.write(pool, torch.arange(pool.num_slots), values.to(dtype))
    q = torch.randn(len(counts), heads, rank, generator=generator).to(dtype)
    q_rope = torch.randn(len(counts), heads, rope, generator=generator).to(dtype)
    slots, count = slot_lists(generator, counts, max(counts), pool.num_slots)
    return q, q_rope, pool, slots, count, (rank + rope) ** -0.5


def agree(found: tuple[Tensor, Tensor], arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Compare with the reference in float64 on the entries as the layout reads them in fp32."""
    q, q_rope, pool, *rest = arguments
    wide = PagedPool(pool.layout.computing_in(F32), pool.storage, pool.page_size)
    out, lse = reference.attention.sparse_mla(q.double(), q_rope.double(), wide, *rest)
    near = 1e-5 if dtype == F32 else 2.0**-8
    torch.testing.assert_close(found[0].double(), out, atol=near, rtol=near)
    torch.testing.assert_close(found[1].double(), lse, atol=1e-4, rtol=1e-5)


PACKED = {
    "one group": Fp8LatentLayout(64, 16),
    "one group, padded": Fp8LatentLayout(40, 6),
    "no rope": Fp8LatentLayout(64, 0),
    "empty rope slot": Fp8LatentLayout(64, 0, has_empty_rope_slot=True),
    "two groups": Fp8LatentLayout(256, 16),
    "three groups, padded": Fp8LatentLayout(384, 16),
}


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("name", PACKED)
def test_packed_pools(name: str, dtype: torch.dtype) -> None:
    layout = PACKED[name].computing_in(dtype)
    shape = (3, layout.latent_dim, layout.rope_dim)
    arguments = draw(layout, shape, [20, 0, 1, 17], dtype)
    agree(attention.KERNELS["sparse_mla"](*arguments), arguments, dtype)


@pytest.mark.parametrize("layout", [Fp8LatentLayout(64, 16), PlainLayout(BF16, 80)])
def test_pages_with_gaps_between_them(layout: KVLayout) -> None:
    arguments = draw(layout, (2, 64, 16), [9, 30], BF16, gap=layout.alignment * 12)
    agree(attention.KERNELS["sparse_mla"](*arguments), arguments, BF16)


def test_packed_latents_in_a_block_of_64_heads() -> None:
    arguments = draw(Fp8LatentLayout(64, 16), (70, 64, 16), [40, 3], BF16)
    for splits in (Splits(1), Splits(2)):
        found = ListCall(*arguments).run(ListTile(64, 16, 8, 2), splits)
        agree(found, arguments, BF16)


@pytest.mark.parametrize("layout", [PlainLayout(BF16, 80), Fp8LatentLayout(64, 16)])
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 24, 40, 96, 128])
def test_head_counts(heads: int, layout: KVLayout) -> None:
    """Native from 8 to 128, whether or not blocks of heads divide them."""
    arguments = draw(layout, (heads, 64, 16), [5, 20], BF16)
    for kernel in (attention.KERNELS["sparse_mla"], attention.FIXED["sparse_mla"]):
        agree(kernel(*arguments), arguments, BF16)


def test_stored_fp32_meets_bf16_queries_and_stored_bf16_fp32_ones() -> None:
    for stored, dtype in ((F32, BF16), (BF16, F32)):
        arguments = draw(PlainLayout(stored, 24, dtype), (2, 16, 8), [5, 20], dtype)
        agree(attention.KERNELS["sparse_mla"](*arguments), arguments, dtype)


@pytest.mark.parametrize("reads_ahead", [False, True])
@pytest.mark.parametrize("splits", [Splits(1), Splits(3), Splits(4, 16), Splits(8, 16)])
def test_splits_add_up(splits: Splits, reads_ahead: bool) -> None:
    counts = [60, 0, 1, 16, 17, 33]
    arguments = draw(PlainLayout(F32, 24), (3, 16, 8), counts, F32)
    tile = replace(HALF_TILE, reads_ahead=reads_ahead)
    agree(ListCall(*arguments).run(tile, splits), arguments, F32)


@pytest.mark.parametrize("splits", [Splits(1), Splits(3), Splits(4, 16)])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_latents_are_read_in_parts(parts: int, splits: Splits) -> None:
    arguments = draw(PlainLayout(BF16, 72), (18, 64, 8), [60, 0, 1, 17], BF16)
    tile = replace(HALF_TILE, reads_ahead=True, parts=parts)
    agree(ListCall(*arguments).run(tile, splits), arguments, BF16)


def test_views_and_int32_slots_are_read_where_they_lie() -> None:
    q, q_rope, pool, slots, count, scale = draw(PlainLayout(BF16, 24), (4, 16, 8), [9, 21], BF16)
    whole = torch.cat((q_rope, q), -1)
    heads_first = whole[..., 8:].transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((2, 50), -1, dtype=torch.int32)
    wide[:, :21] = slots
    found = attention.KERNELS["sparse_mla"](
        heads_first, whole[..., :8], pool, wide[:, :21], count, scale
    )
    agree(found, (q, q_rope, pool, slots, count, scale), BF16)


@pytest.mark.parametrize("kernel", [attention.KERNELS["sparse_mla"], attention.FIXED["sparse_mla"]])
def test_results_are_written_where_the_caller_wants(kernel: Kernel) -> None:
    arguments = draw(PlainLayout(F32, 24), (2, 16, 8), [9, 21, 0], F32)
    room = torch.full((5, 3, 2, 16), math.nan), torch.full((5, 3, 2), math.nan)
    gaps = torch.full((3, 4, 16), math.nan)[:, :2], torch.full((3, 4), math.nan)[:, :2]
    for out in ((room[0][1], room[1][1]), gaps):
        found = kernel(*arguments, out=out)
        assert found[0] is out[0]
        assert found[1] is out[1]
        agree(found, arguments, F32)
    assert room[0][0].isnan().all()
    assert room[0][2:].isnan().all()


@pytest.mark.parametrize(
    ("layout", "shape", "dtype"),
    [(PlainLayout(F32, 24), (3, 16, 8), F32), (Fp8LatentLayout(64, 16), (3, 64, 16), BF16)],
    ids=["plain", "packed"],
)
def test_fixed_bits_hang_on_the_row_alone(
    layout: KVLayout,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_sparse, "FIXED_SPLIT_KEYS", 16)
    kernel = attention.FIXED["sparse_mla"]
    q, q_rope, pool, slots, count, scale = draw(layout, shape, [60, 0, 16, 33], dtype)
    together = kernel(q, q_rope, pool, slots, count, scale)
    agree(together, (q, q_rope, pool, slots, count, scale), dtype)
    for row in range(4):
        one, width = slice(row, row + 1), max(1, int(count[row]))
        alone = kernel(q[one], q_rope[one], pool, slots[one, :width], count[one], scale)
        assert torch.equal(alone[0], together[0][one])
        assert torch.equal(alone[1], together[1][one])
    monkeypatch.setattr(attention_sparse, "FIXED_SCRATCH_BYTES", 1 << 11)  # a few rows at once
    assert torch.equal(kernel(q, q_rope, pool, slots, count, scale)[0], together[0])


def test_nan_codes_reach_the_rows_that_list_them_and_no_other() -> None:
    layout = Fp8LatentLayout(64, 16)
    q, q_rope, pool, slots, count, scale = draw(layout, (2, 64, 16), [4, 4, 4], BF16)
    pool.planes[0].view(-1, layout.bytes_per_token)[int(slots[1, 2]), 5] = 0x7F
    touched = (slots == slots[1, 2]).any(1)
    out, lse = attention.KERNELS["sparse_mla"](q, q_rope, pool, slots, count, scale)
    assert torch.equal(out.isnan().flatten(1).any(1), touched)
    assert torch.equal(lse.isnan().all(1), touched)


def test_other_layouts_are_refused_by_name() -> None:
    layout = Fp8IndexKeyLayout(128)
    pool = layout.allocate(2, 8)
    q = torch.zeros(1, 1, 128)
    slots, count = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="not index_k_132"):
        attention.KERNELS["sparse_mla"](q, q[..., :0], pool, slots, count, 1.0)


@pytest.mark.parametrize("dims", [(24, 16), (48, 40), (96, 64), (192, 128), (256, 256), (20, 12)])
def test_dense_heads_of_any_width(dims: tuple[int, int]) -> None:
    generator = Generator().manual_seed(3)
    width, value_width = dims
    q = torch.randn(2, 21, width, generator=generator).to(BF16).transpose(0, 1)  # heads first
    kv = torch.randn(30, 2, width + value_width, generator=generator).to(BF16)
    k, v = kv.split((width, value_width), -1)
    visible = torch.randint(0, 31, (21,), generator=generator, dtype=torch.int32)
    found = attention.KERNELS["dense_mha"](q, k, v, visible, width**-0.5)
    out, lse = reference.attention.dense_mha(
        q.double(), k.double(), v.double(), visible, width**-0.5
    )
    torch.testing.assert_close(found[0].double(), out, atol=2.0**-8, rtol=2.0**-8)
    torch.testing.assert_close(found[1].double(), lse, atol=1e-5, rtol=1e-5)


def test_dense_bits_hang_on_the_row_alone() -> None:
    generator = Generator().manual_seed(4)
    q, k, v = (torch.randn(70, 2, 24, generator=generator) for _ in range(3))
    visible = torch.arange(70, dtype=torch.int32)
    out, lse = attention.KERNELS["dense_mha"](q, k, v, visible, 0.2)
    for start in (0, 5, 39):
        rows = slice(start, start + 20)
        part = attention.KERNELS["dense_mha"](q[rows], k, v, visible[rows], 0.2)
        assert torch.equal(part[0], out[rows])
        assert torch.equal(part[1], lse[rows])


def test_an_empty_part_is_the_identity_to_the_bit_whatever_it_holds() -> None:
    generator = Generator().manual_seed(5)
    out = torch.randn(9, 3, 20, generator=generator).to(BF16)
    lse = torch.randn(9, 3, generator=generator) * 30
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for found in (
        attention.KERNELS["lse_merge"](out, lse, *empty),
        attention.KERNELS["lse_merge"](*empty, out, lse),
    ):
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)
