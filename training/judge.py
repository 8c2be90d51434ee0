"""Judging a model folder in a few minutes: `python -m training.judge --folder F --workers 8`.

In:  an exported model; which questions, by seed.
Out: one line of JSON a part as each ends, and all of them in a file: `gnomon eval needle` for each
     seed, sparse and dense, by length; tool calls to the letter; sums; recall with faults put in.
Every part is a process of its own. For the choice between trained models; the card (card.py) is
measured apart.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import get_args

from gnomon.evaluate.engine_respondent import EngineRespondent
from gnomon.evaluate.needle import NeedleSettings, run_needle
from gnomon.evaluate.respondent import AskSettings
from gnomon.evaluate.score import Score
from training.data.writing import Family
from training.served import FAULTS_OF, family_of, needle_share, open_served, sums_share, tool_share

Figures = dict[str, float]


def needles(folder: Path, dense: bool, seed: int, length: int) -> Figures:
    """Right answers of the 40 questions of a length."""
    ask = AskSettings(question_seed=seed)
    settings = NeedleSettings(lengths=str(length))
    llm = open_served(folder, dense=dense)
    found = run_needle(EngineRespondent(llm, ask), settings, ask, lambda *_: None)
    how = "dense" if dense else "sparse"
    return {f"eval {length} seed {seed} {how}": Score.of(c.is_correct for c in found.cases).share}


def calls(folder: Path, family: Family, count: int) -> Figures:
    """Tool calls as expected to the letter, and well formed."""
    llm = open_served(folder)
    return {
        f"tools {family} {what}": tool_share(llm, family, count, what)
        for what in ("as expected", "well formed")
    }


def sums(folder: Path, count: int) -> Figures:
    """Sums, differences, stories."""
    llm = open_served(folder)
    family = family_of(folder)
    return {
        f"sums {kind}": sums_share(llm, kind, count, family=family) for kind in ("+", "-", "story")
    }


def faulty(folder: Path, fault: str, count: int) -> Figures:
    """Recall with a fault."""
    share = needle_share(open_served(folder, fault), 1024, count, family=family_of(folder))
    return {f"needle 1024, {fault}": share}


def main() -> None:
    """Judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="file for all figures")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--lengths", default="4096,2048,1024,512")
    parser.add_argument("--count", type=int, default=160, help="prompts of what is no needle")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    folder, count = args.folder, args.count
    parts = [
        partial(needles, folder, dense, int(seed), int(length))
        for length in args.lengths.split(",")
        for seed in args.seeds.split(",")
        for dense in (False, True)
    ]
    parts += [partial(calls, folder, family, count) for family in get_args(Family)]
    parts += [partial(sums, folder, count)]
    parts += [partial(faulty, folder, fault, count // 4) for fault in FAULTS_OF[family_of(folder)]]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: Figures = {}
    with ProcessPoolExecutor(args.workers) as pool:
        for done in as_completed([pool.submit(part) for part in parts]):
            figures |= done.result()
            print(json.dumps({k: round(v, 4) for k, v in done.result().items()}), flush=True)
            args.json.write_text(json.dumps(figures, indent=1, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    main()
