"""Row and cache kernels of the triton provider on this GPU: one line per kernel, about 30 s.

In:  nothing (CUDA). Out: per kernel and number of tokens: microseconds, GB/s (bytes read and
     written once), and the share of what torch's copy of as many bytes reaches, timed alike.
How: calls over as many sets of arguments as make 256 MB, so that the second-level cache is cold, in
     one CUDA graph, so that no launch waits for Python; the median of 10 replays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, KVLayout, PlainLayout
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.providers.triton import cache, prepare, rows
from gnomon.attention.spec.draw import rope_rows

BF16 = torch.bfloat16
PAGE = 64
COLD_BYTES = 256 << 20
LATENTS: tuple[KVLayout, ...] = (PlainLayout(BF16, 576), Fp8LatentLayout(512, 64))
KEYS: tuple[KVLayout, ...] = (PlainLayout(BF16, 128), Fp8IndexKeyLayout(128))
Call = Callable[[], Any]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def rotations(num_rows: int, dim: int, is_interleaved: bool) -> RopeRows:
    rows = rope_rows(list(range(num_rows)), dim, is_interleaved)
    return RopeRows(rows.axis, rows.cos.cuda(), rows.sin.cuda(), is_interleaved)


def microseconds(calls: list[Call]) -> float:
    """Median time of one call, from a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / len(calls) * 1e3


def copy_speed(num_bytes: int, known: dict[int, float]) -> float:
    """GB/s of torch's copy that reads and writes ``num_bytes`` in all."""
    if num_bytes not in known:
        sets = sets_for(num_bytes)
        pairs = [
            torch.empty(2, num_bytes // 2, device="cuda", dtype=torch.uint8) for _ in range(sets)
        ]
        calls: list[Call] = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
        known[num_bytes] = num_bytes / microseconds(calls) / 1e3
    return known[num_bytes]


def sets_for(num_bytes: int) -> int:
    return max(2, min(200, COLD_BYTES // num_bytes))


def norms(n: int) -> Iterator[tuple[str, int, Callable[[], Call]]]:
    weight = numbers(7168)

    def norm() -> Call:
        x = numbers(n, 7168)
        return lambda: rows.rms_norm(x, weight, 1e-6)

    def residual() -> Call:
        x, delta = numbers(n, 7168), numbers(n, 7168)
        return lambda: rows.add_rms_norm(x, delta, weight, 1e-6)

    turn = rotations(n, 64, True)

    def turned() -> Call:
        heads = numbers(n, 128, 192)[..., 128:]
        return lambda: rows.rope(heads, turn)

    yield "rms_norm 7168", 4 * n * 7168, norm
    yield "add_rms_norm 7168", 8 * n * 7168, residual
    yield "rope 128 x 64 of 192", n * (4 * 128 * 64 + 512), turned


def writes(n: int) -> Iterator[tuple[str, int, Callable[[], Call]]]:
    turn, index_turn = rotations(n, 64, True), rotations(n, 64, False)
    norm, weight, bias = numbers(512), numbers(128), numbers(128)
    slots = torch.randperm(n, device="cuda") + PAGE
    pages = n // PAGE + 2
    for latent, key in zip(LATENTS, KEYS, strict=True):

        def write(latent: KVLayout = latent) -> Call:
            kv, pool = numbers(n, 2112)[:, 1536:], latent.allocate(pages, PAGE, device="cuda")
            return lambda: cache.latent_write(kv, norm, 1e-6, turn, pool, slots)

        def index(key: KVLayout = key) -> Call:
            q, k, pool = numbers(n, 64, 128), numbers(n, 128), key.allocate(pages, PAGE, "cuda")
            transform = IndexTransform(weight, bias, 1e-6)
            both = index_turn, index_turn
            return lambda: cache.index_prepare(q, k, transform, both, pool, slots)

        def joined(latent: KVLayout = latent, key: KVLayout = key) -> Call:
            kv, heads = numbers(n, 2112)[:, 1536:], numbers(n, 128, 192)[..., 128:]
            q, k = numbers(n, 64, 128), numbers(n, 128)
            pools = [x.allocate(pages, PAGE, "cuda") for x in (latent, key)]
            first = (kv, norm, 1e-6, turn, pools[0], slots)
            transform, both = IndexTransform(weight, bias, 1e-6), (index_turn, index_turn)
            second = (q, k, transform, both, pools[1], slots)
            return lambda: prepare.prepare_attention(heads, turn, first, second)

        latent_bytes = n * (1152 + 512 + 8 + latent.bytes_per_token)
        index_bytes = n * (4 * 64 * 128 + 256 + 1024 + 8 + key.bytes_per_token)
        yield f"latent_write {latent.id}", latent_bytes, write
        yield f"index_prepare {key.id}", index_bytes, index
        total = latent_bytes + index_bytes + n * (4 * 128 * 64 + 512)
        yield f"prepare_attention {latent.id}", total, joined


def gathers(n: int) -> Iterator[tuple[str, int, Callable[[], Call]]]:
    pages = torch.randperm(n // PAGE, device="cuda").to(torch.int32) + 1
    for layout in (*LATENTS, KEYS[1]):

        def gather(layout: KVLayout = layout) -> Call:
            pool = layout.allocate(n // PAGE + 1, PAGE, device="cuda")
            return lambda: cache.context_gather(pool, pages, 0, n)

        yield f"context_gather {layout.id}", n * (layout.bytes_per_token + 2 * layout.dim), gather


def main() -> None:
    known: dict[int, float] = {}
    print(f"{'kernel':36} {'tokens':>7} {'us':>8} {'GB/s':>7} {'of copy':>8}")
    for n in (64, 4096, 16384):
        for name, num_bytes, make in (*norms(n), *writes(n), *gathers(n)):
            time = microseconds([make() for _ in range(sets_for(num_bytes))])
            speed = num_bytes / time / 1e3
            share = speed / copy_speed(num_bytes, known)
            print(f"{name:36} {n:7} {time:8.2f} {speed:7.0f} {share:8.2f}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
