"""Results of `gnomon bench ops` as lines of a table, as JSON and as a picture.

In:  OpResults, Ceilings. Out: text, plain values, a PNG (needs matplotlib).
Not here: the measurements (ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gnomon.bench.ceilings import Ceilings
from gnomon.bench.ops import OpResult
from gnomon.bench.result_files import new_figure, save_figure

HEADING = (
    f"{'operator and size':<44} {'provider':<10} {'median':>9} {'p10..p90 us':>19} "
    f"{'TFLOP/s':>8} {'GB/s':>6} {'floor':>6}  verdict"
)


def ceiling_line(ceilings: Ceilings) -> str:
    """The ceilings of this run in one line."""
    fp8 = ceilings.fp8_matmul_flop_s
    parts = [
        f"copy {ceilings.copy_bytes_s / 1e9:.0f} GB/s",
        f"matmul {ceilings.matmul_flop_s / 1e12:.2f} TFLOP/s",
    ]
    if fp8 is not None:
        parts.append(f"fp8 matmul {fp8 / 1e12:.0f} TFLOP/s")
    return "ceilings measured now: " + ", ".join(parts)


def cell_lines(result: OpResult) -> list[str]:
    """A line per provider; the first one carries the cell's name."""
    lines = []
    title = f"{result.op} {result.size}" + (" [graph]" if result.is_graph else "")
    for entry in result.times:
        if entry.timing is None:
            lines.append(f"{'':<44} {entry.provider:<10} -  {entry.reason[:90]}")
            continue
        timing = entry.timing
        spread = f"{timing.p10_us:.1f}..{timing.p90_us:.1f}"
        share = result.floor_us / timing.median_us if timing.median_us else 0.0
        lines.append(
            f"{title:<44} {entry.provider:<10} {timing.median_us:>9.1f} {spread:>19} "
            f"{entry.flop_s / 1e12:>8.1f} {entry.bytes_s / 1e9:>6.0f} {share:>5.0%}  "
            f"{verdict(result, entry.provider)}".rstrip()
        )
        title = ""
    return lines or [f"{title:<44} nobody can run it here"]


def ratios(result: OpResult, provider: str) -> dict[str, float]:
    """Anchor -> its median over this provider's; above 1 this provider is faster."""
    own = result.median(provider)
    found = {}
    for anchor, _ in result.aims:
        theirs = result.median(anchor)
        if own is not None and theirs is not None and provider != anchor:
            found[anchor] = theirs / own
    return found


def verdict(result: OpResult, provider: str) -> str:
    """How the portable kernels stand to what is aimed at; "" for other providers."""
    if provider != "triton":
        return ""
    aims, words = dict(result.aims), []
    for anchor, ratio in ratios(result, provider).items():
        word = "reached" if ratio >= aims[anchor] else "MISSED"
        words.append(f"{ratio:.2f} x {anchor} (aim {aims[anchor]:.2f}: {word})")
    return ", ".join(words)


def as_json(results: Sequence[OpResult], ceilings: Ceilings, run: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        "run": run,
        "ceilings": asdict(ceilings),
        "cells": [
            {
                **asdict(result),
                "ratios": {
                    entry.provider: ratios(result, entry.provider)
                    for entry in result.times
                    if entry.timing is not None
                },
            }
            for result in results
        ],
    }


def draw(results: Sequence[OpResult], path: Path, title: str) -> None:
    """A point per provider and cell: time over the floor (needs matplotlib)."""
    shown = [result for result in results if any(entry.timing for entry in result.times)]
    names = sorted({entry.provider for result in shown for entry in result.times if entry.timing})
    figure = new_figure(9, 1 + 0.22 * len(shown))
    axes = figure.add_subplot()
    for name in names:
        rows = [(i, r.median(name), r.floor_us) for i, r in enumerate(shown)]
        held = [(i, time / floor) for i, time, floor in rows if time is not None and floor > 0]
        axes.plot([v for _, v in held], [i for i, _ in held], "o", alpha=0.8, label=name)
    axes.set_yticks(range(len(shown)), [f"{r.op} {r.size}" for r in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time over the floor (FLOPs or bytes at the ceilings of this run)")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    save_figure(figure, path)
