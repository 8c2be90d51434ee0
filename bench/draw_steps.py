"""Draw results of `gnomon bench step` against their peer: one group of bars per step.

In:  FILE=LABEL ... (JSON files of `gnomon bench step --peer`), and last the PNG to write.
Out: the picture: our time over the peer's, scaled by the ceilings of both runs; 1 is parity.
Usage: python bench/draw_steps.py docs/results/h200_step_h128_fp8_auto.json=auto ... out.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def ratios(path: Path) -> dict[str, float]:
    """Step -> our time over the peer's."""
    steps = json.loads(path.read_text())["steps"]
    return {s["step"]: s["ratio_to_peer"] for s in steps if s["ratio_to_peer"] is not None}


def main(arguments: list[str]) -> None:
    """Read the files and draw."""
    *named, target = arguments
    series = []
    for word in named:
        path, _, label = word.partition("=")
        series.append((label or Path(path).stem, ratios(Path(path))))
    steps = list(dict.fromkeys(step for _, found in series for step in found))
    figure = Figure(figsize=(11, 4))
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for place, (label, found) in enumerate(series):
        held = [(x, found[step]) for x, step in enumerate(steps) if step in found]
        axes.bar([x + place * width for x, _ in held], [v for _, v in held], width, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        [x + 0.4 - width / 2 for x in range(len(steps))], steps, rotation=30, ha="right"
    )
    axes.set_ylabel("time / vLLM's (lower is faster)")
    axes.set_ylim(0, 1.5)
    axes.legend(loc="upper center", ncols=len(series), fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(target, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main(sys.argv[1:])
