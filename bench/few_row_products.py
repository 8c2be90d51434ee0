"""Joined products of few rows beside the launches that they stand for, on a GPU, L2 cold.

In:  a CUDA device with Triton. Out: a line per shape: W_UV and quantisation by head; wk with the
     head weights; a router with its choice: microseconds of the parts, of the fusion, and of the
     fusion with other tiles. Each is a captured graph of its own.
Usage: PYTHONPATH=src python bench/few_row_products.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnomon.attention.ops.products import by_head, linear
from gnomon.attention.ops.routing import RouterRule
from gnomon.attention.providers.triton import narrow
from gnomon.attention.providers.triton.heads import heads_quantise
from gnomon.attention.providers.triton.linear_quantise import quantise_rows
from gnomon.attention.providers.triton.route import route_experts
from gnomon.bench.timing import Timing, time_calls

ROWS = (1, 16, 64, 128)
DEVICE = torch.device("cuda", 0)
Call = Callable[[], object]


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def show(name: str, calls: dict[str, Call]) -> None:
    taken = time_calls(calls, DEVICE, num_runs=15, in_graph=True)
    words = [
        f"{n} {t.median_us:.1f}" if isinstance(t, Timing) else f"{n}: {t.reason}"
        for n, t in taken.items()
    ]
    print(f"{name}: {'  '.join(words)}", flush=True)


def heads(num_rows: int, num_heads: int, width: int) -> dict[str, Call]:
    """[M, H, 512] by [H, 512, width]."""
    x = half(num_rows, num_heads, 512)
    weight = half(num_heads, width, 512).transpose(1, 2)
    return {
        "parts": lambda: quantise_rows(by_head(x, weight, True).flatten(1), False),
        "fused": lambda: heads_quantise(x, weight, False),
    }


def index(num_rows: int, depth: int, num_heads: int) -> dict[str, Call]:
    """Wk [128, D] and head weights [Hi, D]."""
    x, key, weights = half(num_rows, depth), half(128, depth), half(num_heads, depth)

    def parts() -> object:
        return linear(x, key, None), linear(x, weights, torch.float32)

    return {"parts": parts, **cut(lambda: narrow.index_products(x, key, weights, num_heads))}


def router(num_rows: int, depth: int, num_experts: int) -> dict[str, Call]:
    """A router [E, D] and its choice of 8."""
    x, weight = half(num_rows, depth), half(num_experts, depth)
    bias = torch.randn(num_experts, device=DEVICE)
    rule = RouterRule(8, 8, 4, True, 2.5)

    def parts() -> object:
        return route_experts(linear(x, weight, torch.float32), bias, None, rule, False)

    return {"parts": parts, **cut(lambda: narrow.route_products(x, weight, bias, None, rule))}


def cut(call: Call) -> dict[str, Call]:
    """The call with K cut in several ways: columns of a program and most parts."""

    def with_sizes(columns: int, parts: int, least: int) -> Call:
        def run() -> object:
            held = narrow.COLUMNS, narrow.MOST_PARTS, narrow.LEAST_DEPTH
            narrow.COLUMNS, narrow.MOST_PARTS, narrow.LEAST_DEPTH = columns, parts, least
            try:
                return call()
            finally:
                narrow.COLUMNS, narrow.MOST_PARTS, narrow.LEAST_DEPTH = held

        return run

    sizes = ((64, 8, 384), (64, 16, 384), (64, 32, 192), (128, 16, 384), (128, 32, 192))
    return {f"{c}/{p}": with_sizes(c, p, least) for c, p, least in sizes}


def main() -> None:
    for num_rows in ROWS:
        for name, num_heads, width in (("h128", 128, 128), ("h16", 16, 128), ("glm", 64, 256)):
            show(f"W_UV {name} {num_rows}", heads(num_rows, num_heads, width))
        show(f"index v32 {num_rows}", index(num_rows, 7168, 64))
        show(f"index glm {num_rows}", index(num_rows, 6144, 32))
        show(f"router {num_rows}", router(num_rows, 7168, 256))


if __name__ == "__main__":
    main()
