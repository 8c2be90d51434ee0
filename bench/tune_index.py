"""Index scores and top-k of the triton provider on this GPU, one line a configuration; <= 60 s.

In:  optionally ANCHORS=DIR (fetch_anchors.sh DIR: DeepGEMM) and VLLM_TOPK=FILE.so (… DIR topk, not
     compressed); CUDA.
Out: lines "operator shape tile  µs  TFLOP/s or GB/s  ratio": ratio = anchor's time / ours, of the
     anchor run here if it is given, else of the figure in anchors_h200.json (another run, "~").
How: captured calls, cold L2, medians, all tiles of a cell in turns (gnomon.bench.timing).
Usage: PYTHONPATH=src python bench/tune_index.py [flat] [paged] [few] [many]   (all by default);
     few and many: rows of top-k
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.layouts import Fp8IndexKeyLayout
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.external import deepgemm
from gnomon.attention.providers.external.places import Places
from gnomon.attention.providers.triton import index, index_launch, index_views, topk
from gnomon.attention.providers.triton.index_views import CODE, Tile
from gnomon.bench.timing import Failure, time_calls

DEVICE = torch.device("cuda")
LAYOUT = Fp8IndexKeyLayout(128, torch.bfloat16)
PAGE = 64
FLAT = [Tile(128, 64, 4, 4), Tile(128, 64, 4, 4, 128), Tile(128, 64, 3, 4, 128)]
FLAT += [Tile(256, 64, 4, 8, 128), Tile(128, 128, 3, 8, 128), Tile(64, 64, 4, 4, 80)]
PAGED = [(Tile(1, 128, 3, 4), 4), (Tile(1, 128, 3, 4), 3), (Tile(1, 128, 3, 4), 2)]
PAGED += [(Tile(1, 128, 4, 4), 4), (Tile(1, 256, 2, 4), 2), (Tile(1, 64, 4, 4), 6)]
SEARCHES = {
    "many": topk.Search(4096, 4096, 4096, 8, 4, 64),
    "many, free": topk.Search(4096, 4096, 4096, 8, 2),
    "many, 80": topk.Search(4096, 4096, 4096, 8, 3, 80),
    "many, 2048": topk.Search(4096, 4096, 2048, 8, 4, 64),
    "many, chunk 2048": topk.Search(4096, 4096, 4096, 8, 4, 64, 2048),
    "many, 8192": topk.Search(8192, 4096, 4096, 16, 2, 64, 2048),
    "many, 8192, 8 warps": topk.Search(8192, 4096, 4096, 8, 2, None, 2048),
    "many, 8192, free": topk.Search(8192, 4096, 4096, 16, 1, None, 2048),
    "many, 3 stages": topk.Search(4096, 4096, 4096, 8, 4, 64, 1024, 3),
    "few": topk.Search(8192, 4096, 8192, 16, 1, None, 2048, 4),
    "few, cap 4096": topk.Search(4096, 4096, 8192, 16, 1, None, 2048, 4),
    "shared": topk.Split(8192, 2048, 2048, 8, 8192, 16),
    "shared, 8 warps": topk.Split(8192, 2048, 2048, 8, 8192, 8, registers=168),
    "shared, 4 warps": topk.Split(8192, 2048, 2048, 8, 8192, 4, registers=255),
    "shared, in turns": topk.Split(8192, 2048, 2048, 8, 8192, 16, is_early=False),
    "shared, sample 4096": topk.Split(8192, 4096, 2048, 8, 8192, 16),
    "shared, parts of 4096": topk.Split(8192, 2048, 4096, 8, 8192, 16),
    "shared, parts by 4 warps": topk.Split(8192, 2048, 2048, 4, 8192, 16),
    "shared, one a processor": topk.Split(8192, 2048, 2048, 8, 8192, 16, programs=1),
    "shared, four a processor": topk.Split(8192, 2048, 2048, 8, 8192, 16, programs=4),
}
KNOWN = {  # µs, anchors_h200.json
    "flat 2048 x 65536 H64": 2222.9,
    "flat 2048 x 65536 H32": 1168.3,
    "flat 2048 x 8192 H64": 233.5,
    "paged 256 x 8192 H64": 80.5,
    "paged 64 x 32768 H64": 80.1,
    "paged 1 x 131072 H64": 13.2,
    "topk 4096 x 65536": 670.5,
    "topk 2048 x 8192": 67.3,
    "topk 64 x 131072": 60.5,
    "topk 1 x 131072": 25.5,
    "topk 256 x 32768": 37.9,
    "topk 16 x 32768": 28.6,
}
Call = Callable[[], Any]


def report(cell: str, calls: Mapping[str, Call], work: float, unit: str) -> None:
    """Time and print a cell; ``work`` of a call, a million ``unit`` · µs."""
    results = time_calls(calls, DEVICE, 12, in_graph=True)
    anchor = results.get("anchor")
    known = KNOWN.get(cell)
    for name, result in results.items():
        if isinstance(result, Failure):
            print(f"{cell:24s} {name:28s} {result.reason}", flush=True)
            continue
        base, mark = (
            (known, "~")
            if anchor is None or isinstance(anchor, Failure)
            else (anchor.median_us, "")
        )
        ratio = f"{base / result.median_us:.2f}{mark}" if base else ""
        rate = work / result.median_us / 1e6
        print(
            f"{cell:24s} {name:28s} {result.median_us:8.1f} us {rate:8.1f} {unit}  {ratio}",
            flush=True,
        )


def anchors() -> Any:
    """DeepGEMM's kernels, or None."""
    folder = os.environ.get("ANCHORS")
    if folder is None:
        return None
    try:
        library = deepgemm.find(Places(folder))
    except Exception as error:
        print(f"no DeepGEMM: {error}", flush=True)
        return None
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return deepgemm.DeepGemm(library, num_sms)


def filled_pool(num_keys: int, num_requests: int) -> tuple[PagedPool, Tensor]:
    pages = num_keys // PAGE
    pool = LAYOUT.allocate(1 + pages * num_requests, PAGE, DEVICE)
    pool.storage.random_(0, 100)
    pool.planes[1].view(torch.float32).fill_(2.0**-6)
    table = 1 + torch.randperm(pages * num_requests, device="cuda").view(num_requests, pages)
    return pool, table.to(torch.int32)


def queries(num_rows: int, heads: int) -> tuple[Tensor, Tensor]:
    q = torch.randn(num_rows, heads, 128, device="cuda", dtype=torch.bfloat16)
    return LAYOUT.round_queries(q), torch.randn(num_rows, heads, device="cuda")


def tiled(tile: Tile, call: Call) -> Call:
    """The call under another tile of FP8."""

    def run() -> Any:
        usual, index_views.PAGED_TILES[CODE] = index_views.PAGED_TILES[CODE], tile
        try:
            return call()
        finally:
            index_views.PAGED_TILES[CODE] = usual

    return run


def flat_cell(library: Any, num_rows: int, num_keys: int, heads: int) -> None:
    q, weights = queries(num_rows, heads)
    pool, table = filled_pool(num_keys, 1)
    count = torch.arange(num_keys - num_rows + 1, num_keys + 1, device="cuda").to(torch.int32)
    keys = index_views.gathered_codes(pool, table[0], num_keys, 256)
    scored = (q, weights, count, 0.01)
    calls: dict[str, Call] = {}
    for tile in FLAT:
        calls[f"{tile}"[4:]] = lambda t=tile: index_launch.code_scores(
            scored, keys, num_keys, t, False
        )
    for fixed, kernel in (("", index.lazy_scores), (" fixed", index.lazy_scores_fixed)):
        calls[f"from the pool{fixed}"] = lambda k=kernel: k(
            q, weights, pool, table[0], num_keys, count, 0.01
        )
    if library is not None:
        calls["anchor"] = lambda: library.lazy_scores(
            q, weights, pool, table[0], num_keys, count, 0.01
        )
    flops = 2 * heads * 128 * float(count.sum())
    report(f"flat {num_rows} x {num_keys} H{heads}", calls, flops, "TFLOP/s")


def flat() -> None:
    library = anchors()
    for shape in ((2048, 65_536, 64), (2048, 65_536, 32), (2048, 8192, 64)):
        flat_cell(library, *shape)


def paged_cell(library: Any, num_rows: int, num_keys: int, heads: int) -> None:
    q, weights = queries(num_rows, heads)
    pool, table = filled_pool(num_keys, num_rows)
    count = torch.full((num_rows,), num_keys, dtype=torch.int32, device="cuda")
    rows = RowPages(table, None, PAGE)
    calls: dict[str, Call] = {}

    def call(resident: int, width: int, table: RowPages = rows) -> Any:
        usual, index_launch.RESIDENT = index_launch.RESIDENT, resident
        try:
            return index.lazy_scores_paged(q, weights, pool, table, count, 0.01, (width, 2048))
        finally:
            index_launch.RESIDENT = usual

    for tile, resident in PAGED:
        name = f"{tile}"[4:] + f" resident {resident}"
        calls[name] = tiled(tile, lambda r=resident: call(r, num_keys))
    wide = RowPages(torch.nn.functional.pad(table, (0, 4096 - table.shape[1])), None, PAGE)
    calls["in a table of 262,144"] = lambda: call(4, 262_144, wide)
    if library is not None:
        calls["anchor"] = lambda: library.lazy_scores_paged(
            q, weights, pool, rows, count, 0.01, (num_keys, 2048)
        )
    moved = num_rows * num_keys * 136.0
    report(f"paged {num_rows} x {num_keys} H{heads}", calls, moved * 1e3, "GB/s")


def paged() -> None:
    library = anchors()
    shapes = ((256, 8192, 64), (64, 32_768, 64), (64, 32_768, 32), (1, 131_072, 64), (16, 8192, 64))
    for shape in shapes:
        paged_cell(library, *shape)


def vllm_topk(scores: Tensor, count: Tensor) -> Call | None:
    """Row top-k of vLLM: the prefill form for many rows, the persistent one for few."""
    path = os.environ.get("VLLM_TOPK")
    if path is None:
        return None
    torch.ops.load_library(path)
    ops = torch.ops._C
    num_rows, found = len(count), torch.empty(len(count), 2048, dtype=torch.int32, device="cuda")
    if num_rows > 512:
        first = torch.zeros_like(count)
        return lambda: ops.top_k_per_row_prefill(
            scores, first, count, found, num_rows, scores.stride(0), scores.stride(1), 2048
        )
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    return lambda: ops.persistent_topk(scores, count, found, workspace, 2048, scores.shape[1])


def best_cell(num_rows: int, num_keys: int, seen: int = 0) -> None:
    """Rows of ``seen`` columns, or of all ``num_keys``."""
    scores = torch.randn(num_rows, num_keys, device="cuda")
    seen = seen or num_keys
    count = torch.full((num_rows,), seen, dtype=torch.int32, device="cuda")
    pages = torch.arange(num_keys // PAGE, dtype=torch.int32, device="cuda").expand(1, -1)
    rows = RowPages(pages.contiguous(), torch.zeros_like(count), PAGE)
    out = topk.topk_slots(scores, count, 2048, False, rows)
    calls: dict[str, Call] = {}
    for name, search in SEARCHES.items():
        if name.startswith("many") == (num_rows > 300):
            calls[name] = lambda s=search: topk._launch(scores, count, 2048, out, rows, s)
    calls["no slots, as chosen"] = lambda: topk.topk(scores, count, 2048)
    correlated = scores.cumsum(1).mul_(0.01).add_(scores)
    calls["as chosen, drifting scores"] = lambda: topk.topk_slots(
        correlated, count, 2048, False, rows, out
    )
    tied = (scores * 4).round_()
    calls["as chosen, ties"] = lambda: topk.topk_slots(tied, count, 2048, False, rows, out)
    anchor = vllm_topk(scores, count)
    if anchor is not None:
        calls["anchor"] = anchor
    cell = f"topk {num_rows} x {num_keys}" + (f" of {seen}" if seen < num_keys else "")
    report(cell, calls, 4e3 * num_rows * seen, "GB/s")


FEW_ROWS = (
    (1, 131_072),
    (16, 32_768),
    (16, 131_072),
    (64, 8192),
    (64, 131_072),
    (64, 32_768),
    (32, 131_072),
    (32, 32_768),
    (64, 131_072, 8192),
    (1, 32_768),
    (128, 32_768),
    (128, 8192),
    (1, 8192),
)
MANY_ROWS = ((4096, 65_536), (2048, 8192), (8192, 8192))


def compile_searches(num_rows: int, names: list[str]) -> None:
    """All of these, in threads: one after the other they take a minute."""
    scores = torch.zeros(num_rows, 16_384, device="cuda")
    count = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    rows = RowPages(torch.ones(1, 256, dtype=torch.int32, device="cuda"), count, PAGE)
    out = topk.topk_slots(None, count, 2048, False, rows)
    with ThreadPoolExecutor(16) as pool:
        for name in names:
            pool.submit(topk._launch, scores, count, 2048, out, rows, SEARCHES[name])
    torch.cuda.synchronize()


def best_of(shapes: tuple[tuple[int, ...], ...]) -> None:
    is_many = shapes is MANY_ROWS
    compile_searches(shapes[0][0], [one for one in SEARCHES if one.startswith("many") == is_many])
    for shape in shapes:
        best_cell(*shape)


def few() -> None:
    best_of(FEW_ROWS)


def many() -> None:
    best_of(MANY_ROWS)


if __name__ == "__main__":
    torch.manual_seed(0)
    wanted = sys.argv[1:] or ["flat", "paged", "few", "many"]
    for name, run in (("flat", flat), ("paged", paged), ("few", few), ("many", many)):
        if name in wanted:
            begin = time.time()
            run()
            print(f"{name}: {time.time() - begin:.0f} s", flush=True)
