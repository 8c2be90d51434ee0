"""Pictures of `gnomon bench serve` and `gnomon bench startup` (they need matplotlib).

In:  a ServeResult, StartupTimes, a file. Out: the file.
Not here: the measurements (serve.py, startup.py), whether a file can be written (result_files.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.bench.result_files import new_figure, save_figure
from gnomon.bench.serve import ServeResult
from gnomon.bench.startup import StartupTime


def draw_serve(result: ServeResult, path: Path) -> None:
    """Shares of requests below each time, for the first token and per token."""
    figure = new_figure(9, 3.5)
    panels: Any = figure.subplots(1, 2, sharey=True)
    settings = result.settings
    series = (
        ("time to first token, ms", [a.ttft_ms for a in result.good], settings.slo_ttft_ms),
        ("time per token, ms", [a.tpot_ms for a in result.good], settings.slo_tpot_ms),
    )
    for axes, (label, values, bound) in zip(panels, series, strict=True):
        count = len(values)
        axes.step(sorted(values), [(place + 1) / count for place in range(count)], where="post")
        if values and bound <= 2 * max(values):
            axes.axvline(bound, color="tab:red", linewidth=0.8)
        axes.set_xlabel(f"{label} (goodput: at most {bound:g})")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of requests")
    save_figure(figure, path)


def draw_startup(times: Sequence[StartupTime], path: Path, title: str) -> None:
    """A line per start: when it was healthy, when it had answered; marks at its stages' ends.

    Stages count from the beginning of the loading, so that their marks are moved to end with it.
    """
    figure = new_figure(9, 1.5 + 0.7 * len(times))
    axes = figure.add_subplot()
    for place, taken in enumerate(times):
        axes.barh(place, taken.healthy_s, 0.4, color="tab:blue", alpha=0.6)
        axes.plot([taken.first_answer_s], [place], "o", color="black")
        last = max((seconds for _, seconds in taken.stages), default=0.0)
        for name, seconds in taken.stages:
            at = taken.healthy_s - last + seconds
            axes.plot([at, at], [place - 0.2, place + 0.2], color="black", linewidth=0.8)
            axes.annotate(name, (at, place + 0.22), rotation=30, fontsize=6, ha="right", va="top")
    axes.set_yticks(range(len(times)), [taken.kind for taken in times])
    axes.set_ylim(len(times) - 0.2, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the launch: bar until healthy, dot at the first answer")
    axes.set_title(title, fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    save_figure(figure, path)
