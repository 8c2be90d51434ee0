"""The model card: measure, and write what was measured: `python -m training.card --to FOLDER`.

In:  the exported folder, the checkpoint it came from (for the MTP layer, which gnomon does not run
     yet), the text of `card.md` with places for numbers.
Out: MODEL_CARD.md in the folder. Its last block is JSON: files, hash, scores with the number of
     prompts of each; a test reads it and measures a small sample anew.
`--measure` takes an hour on one CPU core; without it the numbers of the card that is there stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

from training import checkpoint
from training.measure import exact
from training.model import Model
from training.parameters import initial_parameters
from training.plans import PLANS
from training.selection import Choice
from training.served import FAULTS, needle_share, open_served, sums_share, tool_shares
from training.shapes import CONFIGS, Shape

LENGTHS = (512, 1024, 2048, 4096)
BLOCK = re.compile(r"```json\n(.*?)\n```", re.DOTALL)


def read_card(folder: Path) -> dict[str, Any]:
    """The JSON block of a card."""
    text = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    return json.loads(BLOCK.findall(text)[-1])


def served_scores(folder: Path, count: int) -> dict[str, list[float]]:
    """Name to [share, number of prompts], by gnomon's engine."""
    found: dict[str, list[float]] = {}

    def note(name: str, share: float, prompts: int) -> None:
        found[name] = [round(share, 4), prompts]
        print(name, *found[name], flush=True)

    llm = open_served(folder)
    for kind in ("+", "-", "story"):
        note(f"sums {kind}", sums_share(llm, kind, 2 * count), 2 * count)
    note("sums + thinking", sums_share(llm, "+", count, thinks=True), count)
    for family in ("dsv32", "glm"):
        for name, share in tool_shares(llm, family, count).items():
            note(f"tools {family} {name}", share, count)
    for length in LENGTHS:
        note(f"needle {length}", needle_share(llm, length, count), count)
    del llm
    for fault in FAULTS:
        llm = open_served(folder, fault)
        note(f"needle 1024, {fault}", needle_share(llm, 1024, count // 4), count // 4)
        del llm
    llm = open_served(folder, dense=True)
    for length in LENGTHS:
        note(f"needle {length}, dense", needle_share(llm, length, count), count)
    return found


def mtp_scores(source: Path, count: int) -> dict[str, list[float]]:
    """How often the MTP layer's first draft, teacher-forced, is what the model says next."""
    place = json.loads((source / "progress.json").read_text(encoding="utf-8"))
    shape = Shape.of(CONFIGS[PLANS[place["plan"]].shape])
    params = initial_parameters(shape, 0, "cpu")
    checkpoint.load(source, params, None)
    model = Model(shape, "cpu", torch.float32)
    sizes = {"needle": (count, 4, 512), "sums": (4 * count, 32, 64), "tools": (count, 2, 1024)}
    return {
        f"mtp {kind}": [round(exact(model, params, kind, Choice.EXACT, size)[1], 4), size[0]]
        for kind, size in sizes.items()
    }


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
    text = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
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
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    if args.measure:
        scores = served_scores(args.folder, args.count) | mtp_scores(args.source, 32)
    else:
        scores = read_card(args.folder)["scores"]
    place = json.loads((args.source / "progress.json").read_text(encoding="utf-8"))
    write_card(args.folder, scores, place["minutes"], place["step"])


if __name__ == "__main__":
    main()
