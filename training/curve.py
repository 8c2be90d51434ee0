"""The loss curve as a picture: `python -m training.curve LOG PICTURE`.

In:  log.jsonl of a run (or of its parts, joined).
Out: a PNG: losses above, shares of right answers below, over steps; stages marked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LOSSES = {"text": "next token", "mtp": "MTP", "index": "indexer (KL)"}
SHARES = {
    "right": "answer tokens, in training", 
    "needle 128": "needle 128", "needle 256": "needle 256", "needle 512": "needle 512",
    "needle 1024": "needle 1k",
    "needle 2048": "needle 2k", "needle 4096": "needle 4k", "sums": "sums", "tools": "tool calls",
    "mtp needle": "MTP draft agrees (needle)",
}  # fmt: skip

MEASURED = ("needle", "sums", "tools", "mtp needle")
FEWEST_STEPS = 50  # of a report; the last one before a break may be of a single step


def draw(lines: list[dict[str, Any]], picture: Path, title: str) -> None:
    """Write the picture."""
    before = [0, *(line["step"] for line in lines)]
    lines = [
        line
        for line, last in zip(lines, before, strict=False)
        if line["step"] - last >= FEWEST_STEPS
    ]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
    for axis, names in ((above, LOSSES), (below, SHARES)):
        for name, label in names.items():
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                marker = "o" if name.startswith(MEASURED) else ""
                axis.plot(*zip(*points, strict=True), label=label, lw=1.2, marker=marker, ms=3)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, ncols=2)
    above.set(ylabel="loss (nats)", yscale="log", title=title)
    below.set(ylabel="share right, held out", xlabel="step", ylim=(0, 1.02))
    seen: dict[str, int] = {}
    for line in lines:
        seen.setdefault(line["stage"], line["step"])
    for name, step in seen.items():
        for axis in (above, below):
            axis.axvline(step, color="grey", lw=0.6, ls=":")
        above.text(step, above.get_ylim()[0], f" {name}", fontsize=8, va="bottom", rotation=90)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="Training of the tiny model")
    args = parser.parse_args()
    text = args.log.read_text(encoding="utf-8")
    draw([json.loads(line) for line in text.splitlines()], args.picture, args.title)


if __name__ == "__main__":
    main()
