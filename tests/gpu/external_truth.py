"""Operands and truths for tests of the external adapters on a GPU, written out in float64.

Not here: what is tested (test_external.py).
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
from gnomon.attention.providers.external import external_providers
from gnomon.attention.routes import AttentionDims

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
    """Within FlashMLA's relative bound, plus 2^-8 of the largest value of the row and head: what
    rounding the weights to bf16 may do to it. lse within 1e-3.
    """
    out, lse = (t.double() for t in found)
    assert out.shape == truth[0].shape, (out.shape, truth[0].shape)
    assert lse.shape == truth[1].shape, (lse.shape, truth[1].shape)
    allowed = relative * truth[0].abs() + 2.0**-8 * truth[0].abs().amax(-1, keepdim=True)
    share = (out - truth[0]).abs() / allowed.clamp_min(1e-30)
    assert float(share.max()) <= 1, f"out: {float(share.max()):.2f} of what is allowed"
    is_empty = truth[1] == -math.inf
    assert torch.equal(lse == -math.inf, is_empty), "lse of rows without keys"
    assert float((lse - truth[1])[~is_empty].abs().max()) < 1e-3, "lse"


def index_truth(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    heads = torch.einsum("hd,nd->hn", q.double(), keys.double()).clamp_min(0)
    return (weights.double()[:, None] * heads).sum(0) * INDEX_SCALE


def scores_close(found: Tensor, truth: Tensor) -> None:
    """−inf where it belongs, the rest as near as FP8 tensor cores add up (about 2^-13)."""
    assert found.dtype == torch.float32
    hidden = truth == -math.inf
    assert torch.equal(found == -math.inf, hidden), "columns behind a row's keys"
    a, b = found.double()[~hidden], truth[~hidden]
    assert float((a - b).abs().max()) < 2.0**-9 * float(b.abs().max()), float((a - b).abs().max())
    assert float(1 - 2 * (a * b).sum() / (a * a + b * b).sum()) < 5e-6


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
