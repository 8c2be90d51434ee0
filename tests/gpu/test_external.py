"""Adapters over the real libraries at real widths, against attention written out in float64.

The libraries are looked for where a user has them: installed, or in GNOMON_PROVIDER_PATH (the
folder of shared/tools/fetch_anchors.sh). A library that is not there skips its tests, with the
reason that `gnomon explain` would print. Tolerances are the libraries' own (kernels.md §1).
DeepGEMM compiles its kernels with nvcc: about 20 s at the first run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.dispatch import OpNeed, Provider
from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.external import external_providers
from gnomon.attention.providers.torch.linear import quantise_rows
from gnomon.attention.routes import AttentionDims

pytestmark = pytest.mark.gpu

CUDA = "cuda"
BF16 = torch.bfloat16
SCALE = 192**-0.5
INDEX_SCALE = (64 * 128) ** -0.5
LAYOUTS: Mapping[str, KVLayout] = {
    "bf16_576": PlainLayout(BF16, 576),
    "fp8_ds_mla_656": Fp8LatentLayout(512, 64, read_dtype=BF16),
}
INDEX = Fp8IndexKeyLayout(128, BF16)


@cache
def providers() -> dict[str, Provider]:
    return {p.name: p for p in external_providers(os.environ.get("GNOMON_PROVIDER_PATH"))}


def kernel(name: str, op: str, num_heads: int, layout: str = "bf16_576") -> Callable[..., Any]:
    """A library's kernel; skips where the library is not here, fails where it should serve."""
    dims = AttentionDims(num_heads, 512, 128, 64, 128, 2048, num_heads, 128)
    need = OpNeed(
        device=CUDA,
        dtype=BF16,
        dims=dims,
        latent_layout=layout,
        index_layout="index_k_132",
        is_graph=True,
        page_size=64,
        capability=torch.cuda.get_device_capability(),
    )
    provider = providers()[name]
    verdict = provider.supports(op, need)
    if not verdict.is_ok:
        pytest.skip(f"{name}: {verdict.reason}")
    return provider.kernel(op, need)


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed + sum(shape))
    return torch.randn(shape, device=CUDA, generator=generator).to(dtype)


def filled(layout: KVLayout, num_pages: int) -> PagedPool:
    """A pool of pages of 64 with random entries."""
    pool = layout.allocate(num_pages, 64, CUDA)
    layout.write(pool, torch.arange(pool.num_slots, device=CUDA), draw(pool.num_slots, layout.dim))
    return pool


def lists(counts: list[int], width: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """Distinct random slots [R, width] int64, −1 behind, and counts int32."""
    generator = torch.Generator(CUDA).manual_seed(len(counts))
    order = torch.rand(len(counts), num_slots, device=CUDA, generator=generator)
    slots = order.argsort(1)[:, :width]
    count = torch.tensor(counts, dtype=torch.int32, device=CUDA)
    hidden = torch.arange(width, device=CUDA) >= count[:, None]
    return slots.masked_fill(hidden, -1), count


def sparse_truth(q: Tensor, pool: PagedPool, slots: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for row in range(len(q)):
        entries = pool.layout.gather(pool, slots[row, : int(count[row])]).double()
        logits = q[row].double() @ entries.T * SCALE
        lses.append(logits.logsumexp(-1))
        outs.append(logits.softmax(-1) @ entries[:, :512])
    return torch.stack(outs), torch.stack(lses)


def close(
    found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], relative: float = 3.01 / 128
) -> None:
    """Within FlashMLA's bounds; lse within 1e-3 (P and scales are rounded to bf16 inside)."""
    out, lse = (t.double() for t in found)
    assert out.shape == truth[0].shape, (out.shape, truth[0].shape)
    assert lse.shape == truth[1].shape, (lse.shape, truth[1].shape)
    error = (out - truth[0]).abs() - relative * truth[0].abs()
    assert float(error.max()) <= 8e-4, f"out: {float(error.max()):.2e} beyond {relative:.4f} rel"
    is_empty = truth[1] == -math.inf
    assert torch.equal(lse == -math.inf, is_empty), "lse of rows without keys"
    assert float((lse - truth[1])[~is_empty].abs().max()) < 1e-3, "lse"


COUNTS = [2048, 0, 1, 2047, 63, 64, 65, 1000] + [2048] * 25


@pytest.mark.parametrize("num_heads", [8, 16, 64, 128])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("flashmla", "bf16_576"), ("fa3", "bf16_576"), ("flashmla", "fp8_ds_mla_656")],
)
def test_sparse_mla(name: str, layout: str, num_heads: int) -> None:
    run = kernel(name, "sparse_mla", num_heads, layout)
    pool = filled(LAYOUTS[layout], 64)
    for counts in (COUNTS, [5], [2048] * 300):
        q = draw(len(counts), num_heads, 576)
        slots, count = lists(counts, 2048, pool.num_slots)
        truth = sparse_truth(q, pool, slots, count)
        for _ in range(2):  # the second call finds the schedule of the first
            close(run(q[..., :512], q[..., 512:], pool, slots, count, SCALE), truth)


def test_sparse_mla_of_narrow_lists() -> None:
    """Lists narrower than a block, and of a width that is no whole number of blocks."""
    for name, layout in (
        ("flashmla", "bf16_576"),
        ("fa3", "bf16_576"),
        ("flashmla", "fp8_ds_mla_656"),
    ):
        run = kernel(name, "sparse_mla", 16, layout)
        pool = filled(LAYOUTS[layout], 4)
        for width in (1, 70, 200):
            q = draw(3, 16, 576)
            slots, count = lists([width, 0, 1], width, pool.num_slots)
            truth = sparse_truth(q, pool, slots, count)
            close(run(q[..., :512], q[..., 512:], pool, slots, count, SCALE), truth)


@pytest.mark.parametrize(
    ("num_heads", "dims"), [(128, (192, 128)), (16, (192, 128)), (8, (256, 256))]
)
@pytest.mark.parametrize("first", [1, 700, 1500, 1000, -20])
def test_dense_mha(num_heads: int, dims: tuple[int, int], first: int) -> None:
    """Rows that are causal, behind a context, partly behind the chunk, all of it, before it."""
    run = kernel("fa3", "dense_mha", num_heads)
    q, k = draw(300, num_heads, dims[0]), draw(1000, num_heads, dims[0], seed=1)
    v = draw(1000, num_heads, dims[1], seed=2)
    visible = torch.arange(first, first + 300, device=CUDA).clamp(0, 1000).to(torch.int32)
    visible[5] = 0
    logits = torch.einsum("mhd,nhd->hmn", q.double(), k.double()) * SCALE
    hidden = torch.arange(1000, device=CUDA) >= visible[:, None]
    logits = logits.masked_fill(hidden, -math.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    truth = torch.einsum("hmn,nhd->mhd", weights, v.double()), logits.logsumexp(-1).T
    close(run(q, k, v, visible, SCALE), truth)


def index_truth(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    heads = torch.einsum("hd,nd->hn", q.double(), keys.double()).clamp_min(0)
    return (weights.double()[:, None] * heads).sum(0) * INDEX_SCALE


def scores_close(found: Tensor, truth: Tensor) -> None:
    """Near the truth: −inf where it belongs; the rest as near as FP8 tensor cores add up (about 2^-13 of it)."""
    assert found.dtype == torch.float32
    hidden = truth == -math.inf
    assert torch.equal(found == -math.inf, hidden), "columns behind a row's keys"
    a, b = found.double()[~hidden], truth[~hidden]
    assert float((a - b).abs().max()) < 2.0**-9 * float(b.abs().max()), float((a - b).abs().max())
    assert float(1 - 2 * (a * b).sum() / (a * a + b * b).sum()) < 5e-6


@pytest.mark.parametrize("num_heads", [32, 64])
def test_index_scores(num_heads: int) -> None:
    run = kernel("deepgemm", "index_scores", num_heads)
    for num_rows, num_keys in ((65, 5000), (1, 300), (3, 64)):
        q = INDEX.round_queries(draw(num_rows, num_heads, 128))
        keys = INDEX.round_queries(draw(num_keys, 128))
        weights = draw(num_rows, num_heads, seed=3)
        counts = [num_keys - row * 50 if row * 50 < num_keys else 0 for row in range(num_rows)]
        truth = torch.full((num_rows, num_keys), -math.inf, device=CUDA, dtype=torch.float64)
        for row, count in enumerate(counts):
            truth[row, :count] = index_truth(q[row], keys[:count], weights[row])
        count = torch.tensor(counts, dtype=torch.int32, device=CUDA)
        scores_close(run(q, weights, keys, count, INDEX_SCALE), truth)


@pytest.mark.parametrize("num_heads", [32, 64])
def test_index_scores_paged(num_heads: int) -> None:
    run = kernel("deepgemm", "index_scores_paged", num_heads)
    pool = filled(INDEX, 128)
    for counts in ([5000, 0, 1, 64, 65, 3000] * 7, [700]):
        num_pages = -(-max(counts) // 64)
        pages = torch.stack([torch.randperm(127, device=CUDA)[:num_pages] + 1 for _ in counts]).to(
            torch.int32
        )
        q = INDEX.round_queries(draw(len(counts), num_heads, 128))
        weights = draw(len(counts), num_heads, seed=3)
        truth = torch.full((len(counts), num_pages * 64), -math.inf, device=CUDA).double()
        for row, count in enumerate(counts):
            keys = pool.layout.gather_range(pool, pages[row], 0, num_pages * 64)[:count]
            truth[row, :count] = index_truth(q[row], keys, weights[row])
        count = torch.tensor(counts, dtype=torch.int32, device=CUDA)
        scores_close(run(q, weights, pool, pages, count, INDEX_SCALE), truth)


def test_lazy_scores() -> None:
    """What stands for gather and scores together, below each row's count."""
    kernel("deepgemm", "index_scores_paged", 64)
    pool = filled(INDEX, 128)
    q, weights = INDEX.round_queries(draw(40, 64, 128)), draw(40, 64, seed=3)
    pages = (torch.randperm(127, device=CUDA) + 1).to(torch.int32)[:100].view(2, 50)
    request = (torch.arange(40, device=CUDA) % 3 - 1).to(torch.int32)
    count = torch.arange(100, 3100, 75, device=CUDA).to(torch.int32).masked_fill(request < 0, 0)
    need = OpNeed(device=CUDA, dtype=BF16)
    paged, contiguous = (
        providers()["deepgemm"].fusion(name, need) for name in ("lazy_scores_paged", "lazy_scores")
    )
    assert paged is not None
    assert contiguous is not None
    found = paged(q, weights, pool, RowPages(pages, request, 64), count, INDEX_SCALE, (3100, 64))
    other = contiguous(q, weights, pool, pages[1], 3100, count, INDEX_SCALE)
    for row in range(40):
        length = int(count[row])
        if length:
            keys = pool.layout.gather_range(pool, pages[int(request[row])], 0, length)
            scores_close(found[row, :length], index_truth(q[row], keys, weights[row]))
            keys = pool.layout.gather_range(pool, pages[1], 0, length)
            scores_close(other[row, :length], index_truth(q[row], keys, weights[row]))


@pytest.mark.parametrize("num_rows", [1, 16, 300])
@pytest.mark.parametrize("shape", [(7168, 2112), (1536, 3072), (2048, 7168)])
def test_linear_fp8(num_rows: int, shape: tuple[int, int]) -> None:
    """Rows with scales as quantise_rows leaves them, row after row and column after column."""
    run = kernel("deepgemm", "linear_fp8", 64)
    width, num_columns = shape
    x, x_scales = quantise_rows(draw(num_rows, width), False)
    codes = draw(num_columns, width).to(torch.float8_e4m3fn)
    scales = draw(-(-num_columns // 128), width // 128, dtype=torch.float32).abs() + 0.5
    wide = scales.double().repeat_interleave(128, 0)[:num_columns].repeat_interleave(128, 1)
    rows = x.double() * x_scales.double().repeat_interleave(128, 1)
    truth = rows @ (codes.double() * wide).T
    aligned = torch.zeros(width // 128, -(-num_rows // 4) * 4, device=CUDA)
    aligned[:, :num_rows] = x_scales.T
    for held in (x_scales, aligned.T[:num_rows]):
        found = run(x, held, codes, scales, BF16).double()
        limit = 2.0**-7 * truth.abs() + 2.0**-9 * truth.abs().max()
        assert bool(((found - truth).abs() <= limit).all()), float((found - truth).abs().max())


@pytest.mark.parametrize(
    ("name", "layout"),
    [("flashmla", "bf16_576"), ("fa3", "bf16_576"), ("flashmla", "fp8_ds_mla_656")],
)
def test_sparse_mla_in_a_graph(name: str, layout: str) -> None:
    """A captured call reads what its operands hold at replay: queries, lists and counts."""
    run = kernel(name, "sparse_mla", 16, layout)
    pool = filled(LAYOUTS[layout], 64)
    q = draw(8, 16, 576)
    slots, count = lists([2048] * 8, 2048, pool.num_slots)
    replayed = captured(lambda: run(q[..., :512], q[..., 512:], pool, slots, count, SCALE))
    for counts in ([2048] * 8, [1, 0, 2048, 70, 64, 5, 1999, 0]):
        other, lengths = lists(counts, 2048, pool.num_slots)
        q.copy_(draw(8, 16, 576, seed=sum(counts)))
        slots.copy_(other)
        count.copy_(lengths)
        close(replayed(), sparse_truth(q, pool, slots, count))


def test_paged_scores_in_a_graph() -> None:
    run = kernel("deepgemm", "index_scores_paged", 64)
    pool = filled(INDEX, 128)
    q, weights = INDEX.round_queries(draw(4, 64, 128)), draw(4, 64, seed=3)
    pages = torch.arange(1, 81, dtype=torch.int32, device=CUDA).view(4, 20).contiguous()
    count = torch.full((4,), 1280, dtype=torch.int32, device=CUDA)
    replayed = captured(lambda: run(q, weights, pool, pages, count, INDEX_SCALE))
    for counts in ([1280] * 4, [0, 7, 1280, 600]):
        count.copy_(torch.tensor(counts))
        truth = torch.full((4, 1280), -math.inf, device=CUDA, dtype=torch.float64)
        for row, length in enumerate(counts):
            keys = pool.layout.gather_range(pool, pages[row], 0, 1280)[:length]
            truth[row, :length] = index_truth(q[row], keys, weights[row])
        scores_close(replayed(), truth)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call in a CUDA graph, after a run on a side stream; gives what a replay leaves."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replayed() -> Any:
        graph.replay()
        return result

    return replayed
