"""The model card: measure, and write what was measured: `python -m training.card --to FOLDER`.

In:  the exported folder, the checkpoint it came from (for its steps and minutes), the text of
     `card.md`, or of `card_glm.md`, with places for numbers.
Out: MODEL_CARD.md in the folder. Its last block is JSON: files, hash, scores with the number of
     prompts of each; a test reads it and measures a small sample anew.
`--measure FILE` takes half an hour on a CPU core; without it the card's present numbers stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from training import start
from training.data.writing import Family
from training.measure import exact
from training.model import Model
from training.parameters import initial_parameters
from training.selection import Choice
from training.served import (
    FAULTS_OF,
    eval_share,
    family_of,
    needle_share,
    open_served,
    sums_share,
    tool_share,
)
from training.shapes import Shape

FAMILIES: tuple[Family, ...] = get_args(Family)
LENGTHS = (512, 1024, 2048, 4096)
BLOCK = re.compile(r"```json\n(.*?)\n```", re.DOTALL)


def read_card(folder: Path) -> dict[str, Any]:
    """The JSON block of a card."""
    text = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    return json.loads(BLOCK.findall(text)[-1])


class Scores:
    """Shares with their numbers of prompts, kept in a file, so that measuring can be taken up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known = path.read_text(encoding="utf-8") if path.exists() else "{}"
        self.values: dict[str, list[float]] = json.loads(known)

    def note(self, name: str, prompts: int, measure: Callable[[], float]) -> None:
        """Measure unless it is known."""
        if name not in self.values:
            self.values[name] = [round(measure(), 4), prompts]
            self._path.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
            print(name, *self.values[name], flush=True)


def served_scores(folder: Path, count: int, scores: Scores) -> None:
    """By gnomon's engine."""
    llm, family = open_served(folder), family_of(folder)
    sums, recall = (partial(one, family=family) for one in (sums_share, needle_share))
    for kind in ("+", "-", "story"):
        scores.note(f"sums {kind}", 2 * count, partial(sums, llm, kind, 2 * count))
    scores.note("sums + thinking", count, partial(sums, llm, "+", count, thinks=True))
    for written in FAMILIES:
        for name in ("well formed", "as expected"):
            take = partial(tool_share, llm, written, count, name)
            scores.note(f"tools {written} {name}", count, take)
    for length in LENGTHS:
        scores.note(f"needle {length}", count, partial(recall, llm, length, count))
    scores.note("eval needle", 160, partial(eval_share, llm))
    for fault in FAULTS_OF[family]:
        llm = open_served(folder, fault)
        few = count // 4
        scores.note(f"needle 1024, {fault}", few, partial(recall, llm, 1024, few))
    llm = open_served(folder, dense=True)
    for length in LENGTHS:
        scores.note(f"needle {length}, dense", count, partial(recall, llm, length, count))
    scores.note("eval needle, dense", 160, partial(eval_share, llm))


def mtp_scores(folder: Path, count: int, scores: Scores) -> None:
    """How often the MTP layer's first draft, teacher-forced, is what the model says next."""
    family = family_of(folder)
    shape = Shape.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    params = initial_parameters(shape, 0, "cpu")
    start.fill(params, folder)
    model = Model(shape, "cpu", torch.float32)
    sizes = {"needle": (count, 4, 512), "sums": (4 * count, 32, 64), "tools": (count, 2, 1024)}
    for kind, size in sizes.items():
        take = partial(exact, model, params, kind, Choice.EXACT, size, family)
        scores.note(f"mtp {kind}", size[0], lambda take=take: take()[1])


def files_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file but the card."""
    return {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.iterdir())
        if path.name != "MODEL_CARD.md"
    }


def write_card(folder: Path, scores: dict[str, list[float]], minutes: float, steps: int) -> None:
    """Fill the card's text in."""
    name = "card_glm.md" if family_of(folder) == "glm" else "card.md"
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    for name, (share, prompts) in scores.items():
        text = text.replace(f"{{{name}}}", f"{100 * share:.1f} % ({prompts:.0f})")
    text = text.replace("{minutes}", f"{minutes:.0f}").replace("{steps}", f"{steps:,}")
    left = re.findall(r"\{[a-z][^{}\n]*\}", BLOCK.sub("", text))
    if left:
        raise SystemExit(f"the card asks for what was not measured: {left}")
    data = {"files": files_of(folder), "scores": scores}
    text += f"\n```json\n{json.dumps(data, indent=1)}\n```\n"
    (folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--to", dest="folder", type=Path, required=True)
    parser.add_argument("--measure", type=Path, help="file for the scores, to take up if cut off")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument(
        "--earlier", nargs=2, type=float, default=(0, 0), metavar=("STEPS", "MINUTES"),
        help="of the run that made the model which this one started from",
    )  # fmt: skip
    args = parser.parse_args()
    if args.measure:
        found = Scores(args.measure)
        served_scores(args.folder, args.count, found)
        mtp_scores(args.folder, 32, found)
        scores = found.values
    else:
        scores = read_card(args.folder)["scores"]
    place = json.loads((args.source / "progress.json").read_text(encoding="utf-8"))
    steps, minutes = args.earlier
    write_card(args.folder, scores, place["minutes"] + minutes, place["step"] + int(steps))


if __name__ == "__main__":
    main()
