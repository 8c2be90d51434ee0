"""Attention kernels of the triton provider on a GPU: the specs, real widths, splits, bits, graphs.

The oracle is softmax attention in float64, written here, over entries as the layout reads them.
One process, about a minute with a cold kernel cache.
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.spec import SPECS
from gnomon.attention.spec.check import check_provider
from gnomon.attention.spec.model import Case, Scale

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
COUNTS = [2048, 0, 1, 2047, 65, 1000, 512, 513, 64]
Result = tuple[Tensor, Tensor]


def modules(*names: str) -> tuple[Any, ...]:
    """Modules of the provider; imported in the test, as triton is not everywhere."""
    package = "gnomon.attention.providers.triton"
    return tuple(importlib.import_module(f"{package}.{name}") for name in names)


def on_gpu(value: Any) -> Any:
    if isinstance(value, PagedPool):
        return PagedPool(value.layout, value.storage.cuda(), value.page_size)
    return value.cuda() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("op", ["sparse_mla", "dense_mha", "lse_merge"])
def test_every_case_of_the_specs(op: str, dtype: torch.dtype) -> None:
    (attention,) = modules("attention")
    sets = [KernelSet("triton", 20, attention.KERNELS)]
    sets += [KernelSet("triton fixed", 20, attention.FIXED)] if op in attention.FIXED else []
    for case in SPECS[op].cases(Generator().manual_seed(1), dtype, Scale()):
        moved = Case(case.label, tuple(on_gpu(value) for value in case.arguments))
        for kernels in sets:
            result = check_provider(SPECS[op], kernels, moved, dtype)
            assert result.is_ok, result


def draw(
    layout: KVLayout, num_heads: int, counts: list[int], dtype: torch.dtype, num_pages: int = 256
) -> tuple[Any, ...]:
    """Arguments of sparse_mla at real widths over a filled pool; lists 2048 wide."""
    generator = Generator("cuda").manual_seed(3)
    pool = layout.allocate(num_pages, 64, "cuda")
    values = torch.randn(64 * 256, layout.dim, generator=generator, device="cuda")
    places = torch.arange(pool.num_slots - len(values), pool.num_slots, device="cuda")
    layout.write(pool, places, values.to(dtype))
    shape = (num_heads, len(counts), 512)  # heads first, as the product before it leaves them
    q = torch.randn(shape, generator=generator, device="cuda").to(dtype).transpose(0, 1)
    shape = (len(counts), num_heads, layout.dim - 512)
    q_rope = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    picks = torch.rand(len(counts), len(values), generator=generator, device="cuda")
    slots = places[picks.topk(2048).indices]
    count = torch.tensor(counts, dtype=torch.int32, device="cuda")
    slots[torch.arange(2048, device="cuda") >= count[:, None]] = -1
    return q, q_rope, pool, slots, count, layout.dim**-0.5


def truth(arguments: tuple[Any, ...]) -> Result:
    """Out and lse in float64."""
    q, q_rope, pool, slots, count, scale = arguments
    query = torch.cat((q, q_rope), -1).double()
    wide = replace(pool, layout=pool.layout.computing_in(F32))
    entries = wide.layout.gather(wide, slots).double()
    logits = query @ entries.mT * scale
    hidden = torch.arange(slots.shape[1], device="cuda") >= count[:, None]
    logits = logits.masked_fill(hidden[:, None], -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    return weights @ entries[..., :512], logits.logsumexp(-1)


def agree(found: Result, expected: Result, near: float) -> None:
    torch.testing.assert_close(found[0].double(), expected[0], atol=near, rtol=near * 4)
    torch.testing.assert_close(found[1].double(), expected[1], atol=1e-4, rtol=1e-5)


LAYOUTS = {
    "bf16": PlainLayout(BF16, 576),
    "fp8": Fp8LatentLayout(512, 64),
    "fp8 without rope": Fp8LatentLayout(512, 0),
}


REAL = [("bf16", 16), ("bf16", 32), ("bf16", 128), ("fp8", 8), ("fp8", 32), ("fp8", 128)]
REAL += [("fp8 without rope", 16)]
FEW = [("bf16", 16), ("fp8", 8)]
SOME = [*FEW, ("bf16", 128), ("fp8", 128)]


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels of REAL, compiled side by side."""
    sparse, attention = modules("attention_sparse", "attention")

    def compile_one(job: tuple[str, int, int]) -> None:
        name, num_heads, splits = job
        arguments = draw(LAYOUTS[name], num_heads, COUNTS, BF16)
        if splits == 0:
            attention.FIXED["sparse_mla"](*arguments)
            return
        call, tile = sparse.ListCall(*arguments), sparse.tile_of(arguments[0], arguments[2])
        call.run(tile, sparse.Splits(splits))

    jobs = [(*pair, splits) for splits in (1, 4, 0) for pair in REAL]
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, jobs))
    torch.cuda.synchronize()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("name", "num_heads"), REAL)
def test_real_widths_with_any_splits(name: str, num_heads: int) -> None:
    sparse, attention = modules("attention_sparse", "attention")
    arguments = draw(LAYOUTS[name], num_heads, COUNTS, BF16)
    expected = truth(arguments)
    call, tile = sparse.ListCall(*arguments), sparse.tile_of(arguments[0], arguments[2])
    for splits in (sparse.Splits(1), sparse.Splits(4)):
        agree(call.run(tile, splits), expected, 2.0**-9)
    agree(attention.KERNELS["sparse_mla"](*arguments), expected, 2.0**-9)
    agree(attention.FIXED["sparse_mla"](*arguments), expected, 2.0**-9)


@pytest.mark.parametrize("name", ["fp32", "fp8"])
def test_fp32_queries_are_computed_in_fp32(name: str) -> None:
    (attention,) = modules("attention")
    layout = PlainLayout(F32, 576) if name == "fp32" else LAYOUTS["fp8"].computing_in(F32)
    arguments = draw(layout, 8, COUNTS[:6], F32)
    agree(attention.KERNELS["sparse_mla"](*arguments), truth(arguments), 2e-6)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("name", "num_heads"), SOME)
def test_fixed_bits_hang_on_the_row_alone(name: str, num_heads: int) -> None:
    (attention,) = modules("attention")
    kernel = attention.FIXED["sparse_mla"]
    q, q_rope, pool, slots, count, scale = draw(LAYOUTS[name], num_heads, COUNTS * 8, BF16)
    out, lse = kernel(q, q_rope, pool, slots, count, scale)
    for row in (0, 3, 4, 5, 7, 70):
        one, width = slice(row, row + 1), max(1, int(count[row]))
        alone = kernel(q[one], q_rope[one], pool, slots[one, :width], count[one], scale)
        assert torch.equal(alone[0], out[one]), (row, int(count[row]))
        assert torch.equal(alone[1], lse[one]), (row, int(count[row]))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("name", "num_heads"), SOME)
def test_ten_runs_give_the_same_bits(name: str, num_heads: int) -> None:
    (attention,) = modules("attention")
    arguments = draw(LAYOUTS[name], num_heads, COUNTS, BF16)
    first, _ = attention.KERNELS["sparse_mla"](*arguments)
    for _ in range(9):
        assert torch.equal(attention.KERNELS["sparse_mla"](*arguments)[0], first)


def test_entries_that_no_row_lists_are_not_read() -> None:
    (attention,) = modules("attention")
    arguments = draw(LAYOUTS["bf16"], 16, COUNTS[1:], BF16)
    pool, slots = arguments[2], arguments[3]
    unread = torch.ones(pool.num_slots, dtype=torch.bool, device="cuda")
    unread[slots[slots >= 0]] = False
    before = attention.KERNELS["sparse_mla"](*arguments)
    pool.typed()[unread] = torch.nan
    assert torch.equal(attention.KERNELS["sparse_mla"](*arguments)[0], before[0])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("name", "num_heads"), FEW)
def test_a_captured_call_reads_new_lists_and_counts(name: str, num_heads: int) -> None:
    (attention,) = modules("attention")
    q, q_rope, pool, slots, count, scale = draw(LAYOUTS[name], num_heads, COUNTS, BF16)
    kernel = attention.KERNELS["sparse_mla"]
    kernel(q, q_rope, pool, slots, count, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel(q, q_rope, pool, slots, count, scale)
    for order in (torch.arange(len(COUNTS)).flip(0), torch.arange(len(COUNTS))):
        given = slots[order.cuda()].clone(), count[order.cuda()].clone()
        slots.copy_(given[0])
        count.copy_(given[1])
        graph.replay()
        agree((out, lse), truth((q, q_rope, pool, slots, count, scale)), 2.0**-9)


@pytest.mark.parametrize(("name", "num_heads"), FEW)
def test_pools_beyond_two_to_the_31_bytes(name: str, num_heads: int) -> None:
    (attention,) = modules("attention")
    layout = LAYOUTS[name]
    num_pages = (5 << 30) // 2 // layout.page_bytes(64)
    arguments = draw(layout, num_heads, [2048, 100], BF16, num_pages)
    agree(attention.KERNELS["sparse_mla"](*arguments), truth(arguments), 2.0**-9)


def dense_truth(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Result:
    """Out and lse in float64."""
    logits = torch.einsum("mhd,nhd->mhn", q.double(), k.double()) * scale
    hidden = torch.arange(k.shape[0], device="cuda") >= visible[:, None]
    logits = logits.masked_fill(hidden[:, None], -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    return torch.einsum("mhn,nhd->mhd", weights, v.double()), logits.logsumexp(-1)


@pytest.mark.parametrize(("dtype", "near"), [(BF16, 2.0**-9), (F16, 2.0**-11), (F32, 2e-6)])
@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (256, 256)])  # V3.2, GLM-5
def test_dense_heads(width: int, value_width: int, dtype: torch.dtype, near: float) -> None:
    (attention,) = modules("attention")
    generator = Generator("cuda").manual_seed(5)
    q, k = (torch.randn(n, 3, width, generator=generator, device="cuda") for n in (700, 1500))
    v = torch.randn(1500, 3, value_width, generator=generator, device="cuda").to(dtype)
    q, k = q.to(dtype), k.to(dtype)
    gaps = torch.randint(0, 1501, (700,), generator=generator, device="cuda", dtype=torch.int32)
    causal = torch.arange(801, 1501, dtype=torch.int32, device="cuda")
    for visible in (causal, gaps.masked_fill(gaps % 5 == 0, 0)):
        found = attention.KERNELS["dense_mha"](q, k, v, visible, width**-0.5)
        agree(found, dense_truth(q, k, v, visible, width**-0.5), near)
        rows = slice(333, 500)
        part = attention.KERNELS["dense_mha"](q[rows], k, v, visible[rows], width**-0.5)
        assert torch.equal(part[0], found[0][rows])
