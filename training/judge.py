"""Judging a model folder in a few minutes: `python -m training.judge --folder F --workers 8`.

In:  an exported model; which questions, by seed.
Out: a file that card.py takes as `--measure`: share and number of prompts by name; a line of JSON
     as each part ends. Beyond the card's own names, those of `gnomon eval needle` by length and
     seed, sparse and dense.
Every part is a process of its own, the longest first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from gnomon.evaluate.engine_respondent import EngineRespondent
from gnomon.evaluate.needle import NeedleSettings, run_needle
from gnomon.evaluate.respondent import AskSettings
from gnomon.evaluate.score import Score
from training.card import LENGTHS, Scores, mtp_scores
from training.data.writing import Family
from training.served import FAULTS_OF, family_of, needle_share, open_served, sums_share, tool_share

Figures = dict[str, list[float]]
QUESTIONS = 40  # of gnomon eval needle, a length


def evaluated(folder: Path, length: int, dense: bool, seed: int) -> Figures:
    """`gnomon eval needle` of one length."""
    ask = AskSettings(question_seed=seed)
    respondent = EngineRespondent(open_served(folder, dense=dense), ask)
    found = run_needle(respondent, NeedleSettings(lengths=str(length)), ask, lambda *_: None)
    share = Score.of(case.is_correct for case in found.cases).share
    return {evaluated_name(length, dense, seed): [share, len(found.cases)]}


def evaluated_name(length: int, dense: bool, seed: int) -> str:
    """As "eval needle 512, seed 0, dense"."""
    return f"eval needle {length}, seed {seed}" + ", dense" * dense


def recalled(folder: Path, length: int, dense: bool, count: int) -> Figures:
    """Recall in the recipe's own words."""
    llm = open_served(folder, dense=dense)
    share = needle_share(llm, length, count, family=family_of(folder))
    return {f"needle {length}" + ", dense" * dense: [share, count]}


def called(folder: Path, family: Family, count: int) -> Figures:
    """Tool calls as expected to the letter, and well formed."""
    llm = open_served(folder)
    return {
        f"tools {family} {what}": [tool_share(llm, family, count, what), count]
        for what in ("as expected", "well formed")
    }


def summed(folder: Path, count: int) -> Figures:
    """Sums, differences, stories; sums with thoughts."""
    llm, family = open_served(folder), family_of(folder)
    found: Figures = {
        f"sums {kind}": [sums_share(llm, kind, count, family=family), count]
        for kind in ("+", "-", "story")
    }
    thoughtful = sums_share(llm, "+", count // 2, thinks=True, family=family)
    return found | {"sums + thinking": [thoughtful, count // 2]}


def faulty(folder: Path, fault: str, count: int) -> Figures:
    """Recall with a fault."""
    share = needle_share(open_served(folder, fault), 1024, count, family=family_of(folder))
    return {f"needle 1024, {fault}": [share, count]}


def drafted(folder: Path, place: Path) -> Figures:
    """The MTP layer's agreement."""
    place.with_suffix(".mtp").unlink(missing_ok=True)  # of another model: it would be kept
    scores = Scores(place.with_suffix(".mtp"))
    mtp_scores(folder, 32, scores)
    return scores.values


def parts(args: argparse.Namespace) -> list[Callable[[], Figures]]:
    """Everything that is to be measured."""
    folder, count = args.folder, args.count
    lengths = sorted((int(length) for length in args.lengths.split(",")), reverse=True)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    found: list[Callable[[], Figures]] = []
    for length in lengths:
        for dense in (True, False):
            found.append(partial(recalled, folder, length, dense, count))
            found += [partial(evaluated, folder, length, dense, seed) for seed in seeds]
    found += [partial(called, folder, family, count) for family in get_args(Family)]
    found += [partial(summed, folder, 2 * count), partial(drafted, folder, args.json)]
    return found + [
        partial(faulty, folder, fault, count // 4) for fault in FAULTS_OF[family_of(folder)]
    ]


def with_totals(figures: Figures) -> Figures:
    """With "eval needle", over the lengths of the first seed."""
    total: Figures = {}
    for name, dense in (("eval needle", False), ("eval needle, dense", True)):
        own = [figures.get(evaluated_name(length, dense, 0)) for length in LENGTHS]
        if all(own):
            total[name] = [sum(one[0] for one in own if one) / len(own), QUESTIONS * len(own)]
    return {k: [round(v[0], 4), v[1]] for k, v in sorted((figures | total).items())}


def main() -> None:
    """Judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="file for all figures")
    parser.add_argument("--seeds", default="0,1,2", help="of gnomon eval needle")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--count", type=int, default=160, help="prompts of a kind, about")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    figures: Figures = {}
    with ProcessPoolExecutor(
        args.workers, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for done in as_completed([pool.submit(part) for part in parts(args)]):
            figures |= done.result()
            print(json.dumps(done.result()), flush=True)
            text = json.dumps(with_totals(figures), indent=1)
            args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
