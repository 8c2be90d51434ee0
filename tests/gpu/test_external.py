"""Adapters over the real libraries at real widths, against attention written out in float64.

The libraries are looked for where a user has them: installed, or in GNOMON_PROVIDER_PATH (the
folder of shared/tools/fetch_anchors.sh). A library that is not there skips its tests, with the
reason that `gnomon explain` would print. Tolerances are the libraries' own (kernels.md §1).
DeepGEMM compiles its kernels with nvcc: about 20 s at the first run.
"""

from __future__ import annotations

import math

import pytest
import torch

from gnomon.attention.dispatch import OpNeed
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.torch.linear import moe_fp8, quantise_rows
from tests.gpu.external_truth import (
    BF16,
    CUDA,
    INDEX,
    INDEX_SCALE,
    LAYOUTS,
    SCALE,
    captured,
    close,
    draw,
    filled,
    index_truth,
    kernel,
    lists,
    providers,
    scores_close,
    sparse_truth,
)

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("num_rows", [2052, 3900])
def test_linear_fp8_by_blocks(num_rows: int) -> None:
    """A small rest is triton's; rows of a large one are taken twice."""
    test_linear_fp8(num_rows, (1536, 3072))


@pytest.mark.parametrize("num_rows", [1, 300, 3000])
def test_moe_fp8(num_rows: int) -> None:
    run = kernel("deepgemm", "moe_fp8", 64)
    num_experts, hidden, inner = 16, 1024, 256
    x = quantise_rows(draw(num_rows, hidden), False)
    ids = torch.rand(num_rows, num_experts, device=CUDA).argsort(1)[:, :4]
    ids[::3, 1] = -1
    weights = draw(num_rows, 4).abs()
    gate_up, down = (
        (
            draw(num_experts, rows, width, seed=rows).to(torch.float8_e4m3fn),
            draw(num_experts, rows // 128, width // 128, dtype=torch.float32).abs() / 32,
        )
        for rows, width in ((2 * inner, hidden), (hidden, inner))
    )
    found = run(x, ids, weights, gate_up, down, False, BF16).double()
    truth = moe_fp8(x, ids, weights, gate_up, down, False, torch.float64)
    # Hidden values are rounded to bf16 on the way: about 3 % of their codes are the next one, which
    # is 1.3 % of a row's size as a rule and 4 % in the worst of 3,000 rows; a wrong expert is 50 %.
    share = (found - truth).square().mean(1).sqrt() / truth.square().mean(1).sqrt()
    assert bool((share <= 0.125).all()), float(share.max())


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
