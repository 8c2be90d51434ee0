"""Our exact top-k beside vLLM's row top-k operators, in one run, with the sets compared; <= 60 s.

In:  CUDA; the file that `fetch_anchors.sh DIR topk` leaves, compressed or not (--peers).
Out: lines "shape operator  median µs  p10 p90  ratio  same sets": ratio = the fastest peer's
     median / the operator's (aim: ours >= 0.67 at 4096 x 64k and 64 x 128k); --json writes them.
How: ours gives sorted ids (and, as "with slots", their slots); vLLM's give the ids in any order. A
     captured call each, eager where it cannot be captured; cold L2; they take turns
     (gnomon.bench.timing). A peer that fails prints why, and the others go on.
Usage: PYTHONPATH=src python bench/topk_peers.py --peers .anchors_topk [--json FILE] [--first 6]
"""

from __future__ import annotations

import argparse
import json
import lzma
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.triton import topk
from gnomon.bench.machine import describe_run
from gnomon.bench.timing import Failure, Timing, time_calls

DEVICE = torch.device("cuda")
LIBRARY = "_C_stable_libtorch.abi3.so"
K, PAGE = 2048, 64
WORKSPACE = 1 << 20  # bytes; what vLLM hands to its persistent form
SHAPES = (
    (4096, 65_536),
    (64, 131_072),
    (1, 131_072),
    (1, 32_768),
    (16, 32_768),
    (16, 131_072),
    (2048, 65_536),
    (2048, 8192),
    (256, 32_768),
)
Call = Callable[[], Any]


def load(place: Path) -> bool:
    """Register vLLM's operators; False, with the reason printed, where that fails."""
    path = place / LIBRARY if place.is_dir() else place
    try:
        if not path.exists():
            path = Path(tempfile.mkdtemp()) / LIBRARY
            with lzma.open(place / f"{LIBRARY}.xz") as packed:
                path.write_bytes(packed.read())
        torch.ops.load_library(str(path))
    except Exception as error:  # the comparison is what this script is for, ours is timed anyway
        print(f"no peers: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return False
    return True


def peer_calls(scores: Tensor, count: Tensor) -> dict[str, tuple[Call, Tensor]]:
    """VLLM's operators on these rows, each with what it writes."""
    ops = torch.ops._C
    num_rows, width = scores.shape
    first = torch.zeros_like(count)

    def empty() -> Tensor:
        return torch.full((num_rows, K), -1, dtype=torch.int32, device="cuda")

    def with_workspace(name: str, out: Tensor) -> Call:
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
        return lambda: getattr(ops, name)(scores, count, out, workspace, K, width)

    out = [empty() for _ in range(4)]
    strides = scores.stride(0), scores.stride(1)
    calls: dict[str, tuple[Call, Tensor]] = {}
    calls["vllm top_k_per_row_prefill"] = (
        lambda: ops.top_k_per_row_prefill(scores, first, count, out[0], num_rows, *strides, K),
        out[0],
    )
    calls["vllm top_k_per_row_decode"] = (
        lambda: ops.top_k_per_row_decode(scores, 1, count, out[1], num_rows, *strides, K),
        out[1],
    )
    calls["vllm persistent_topk"] = with_workspace("persistent_topk", out[2]), out[2]
    if num_rows <= 32:
        calls["vllm cooperative_topk"] = with_workspace("cooperative_topk", out[3]), out[3]
    return calls


def our_calls(scores: Tensor, count: Tensor) -> dict[str, Call]:
    """Ids alone, and ids with slots."""
    pages = torch.arange(1, scores.shape[1] // PAGE + 1, dtype=torch.int32, device="cuda")
    rows = RowPages(pages[None], torch.zeros_like(count), PAGE)
    return {
        "gnomon topk": lambda: topk.topk(scores, count, K),
        "gnomon topk_slots": lambda: topk.topk_slots(scores, count, K, False, rows),
    }


def compile_ours(shapes: tuple[tuple[int, int], ...]) -> None:
    """Every form that the shapes need, in threads."""
    with ThreadPoolExecutor(8) as pool:
        for num_rows, num_keys in shapes:
            scores = torch.zeros(num_rows, num_keys, device="cuda")
            count = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
            for call in our_calls(scores, count).values():
                pool.submit(call)
    torch.cuda.synchronize()


def share_of_same_sets(found: Tensor, ids: Tensor) -> float:
    """Share of the rows whose sets are equal."""
    same = (found.sort(dim=1).values == ids.sort(dim=1).values).all(dim=1)
    return float(same.double().mean())


def timed(calls: dict[str, Call], runs: int) -> dict[str, Timing | Failure]:
    """Captured; what cannot be captured is timed again without."""
    found = time_calls(calls, DEVICE, runs, in_graph=True)
    failed = {name: calls[name] for name, one in found.items() if isinstance(one, Failure)}
    for name in failed:
        print(f"{name}, captured: {found[name]}", flush=True)
    return found | time_calls(failed, DEVICE, runs)


def cell(num_rows: int, num_keys: int, has_peers: bool, runs: int) -> list[dict[str, Any]]:
    """Rows of the table for one shape, printed as well."""
    scores = torch.randn(num_rows, num_keys, device="cuda")
    count = torch.full((num_rows,), num_keys, dtype=torch.int32, device="cuda")
    ids = topk.topk(scores, count, K).ids
    peers = peer_calls(scores, count) if has_peers else {}
    calls = our_calls(scores, count) | {name: call for name, (call, _) in peers.items()}
    results = timed(calls, runs)
    medians = [
        one.median_us for name, one in results.items() if name in peers and isinstance(one, Timing)
    ]
    rows: list[dict[str, Any]] = []
    for name, result in results.items():
        line = f"topk {num_rows} x {num_keys}  {name:28s}"
        if isinstance(result, Failure):
            print(f"{line} {result.reason}", flush=True)
            rows.append({"rows": num_rows, "keys": num_keys, "op": name, "error": result.reason})
            continue
        ratio = min(medians) / result.median_us if medians else None
        same = share_of_same_sets(peers[name][1], ids) if name in peers else 1.0
        spread = f"{result.p10_us:7.1f} {result.p90_us:7.1f}"
        shown = "" if ratio is None else f"{ratio:.2f}"
        print(f"{line} {result.median_us:8.1f} us {spread}  {shown:5s} {same:.3f}", flush=True)
        timing = {"median_us": result.median_us, "p10_us": result.p10_us, "p90_us": result.p90_us}
        named = {"rows": num_rows, "keys": num_keys, "op": name}
        rows.append({**named, **timing, "ratio": ratio, "same_sets": same})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=len(SHAPES), help="so many shapes")
    given = parser.parse_args()
    begin = time.time()
    has_peers = load(given.peers)
    print(f"loaded: {time.time() - begin:.0f} s", flush=True)
    shapes = SHAPES[: given.first]
    compile_ours(shapes)
    print(f"compiled: {time.time() - begin:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        try:
            rows += cell(*shape, has_peers, given.runs)
        except Exception as error:  # e.g. a peer's fault left for the next synchronisation
            print(f"topk {shape}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if given.json is not None:
            run = describe_run(DEVICE) | {"command": shlex.join(["python", *sys.argv])}
            found = {"run": run, "k": K, "cells": rows}
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
