"""Make mistakes, run the tests that should see them, print those that survive.

In:  options (--help). Out: exit status 0 if every hand-picked mistake and at least 90 % of the
generated ones are caught, 1 if not, 2 if a mutant or a selection does not fit the source.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.mutation import mistakes_attention, mistakes_engine, mistakes_numbers
from tools.mutation.generate import generate
from tools.mutation.mutant import Mistake, Mutant, MutantError, place
from tools.mutation.nest import Ending, preload
from tools.mutation.report import (
    MIN_CAUGHT,
    about_this_run,
    entry,
    equivalence,
    line_of,
    merged,
    names_done,
    write_json,
)
from tools.mutation.selections import SELECTIONS
from tools.mutation.trial import CPU_LIMIT_S, Tree

REPOSITORY = Path(__file__).resolve().parents[2]
MISTAKES: tuple[Mistake, ...] = (
    *mistakes_attention.MISTAKES,
    *mistakes_numbers.MISTAKES,
    *mistakes_engine.MISTAKES,
)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("--generated", type=int, default=80, help="how many to generate (80)")
    parser.add_argument("--seed", type=int, default=3, help="of the generated ones (3)")
    parser.add_argument("--no-hand", action="store_true", help="leave the hand-picked ones out")
    parser.add_argument("--commit", help="mutate this commit instead of the working tree")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only mutants of these names")
    parser.add_argument(
        "--again", type=Path, help="only what this report does not call caught; merge the two"
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser.parse_args(arguments)


def mutants(tree: Tree, chosen: argparse.Namespace) -> dict[str, list[Mutant]]:
    """Hand-picked and generated. MutantError with every mistake that does not fit the source."""
    placed, misfits = [], []
    for mistake in () if chosen.no_hand else MISTAKES:
        try:
            placed.append(place(mistake, tree.read(mistake.path)))
        except MutantError as error:
            misfits.append(str(error))
    if misfits:
        raise MutantError("\n".join(misfits))
    sources = {path: tree.read(path) for path in SELECTIONS}
    made = {
        "hand": placed,
        "generated": generate(sources, SELECTIONS, chosen.seed, chosen.generated),
    }
    if chosen.again:
        done = names_done(json.loads(chosen.again.read_text("utf-8")))
        made = {kind: [m for m in some if m.name not in done] for kind, some in made.items()}
    if chosen.only:
        made = {kind: [m for m in some if m.name in chosen.only] for kind, some in made.items()}
    return made


def measure(tree: Tree, made: dict[str, list[Mutant]]) -> dict[str, float]:
    """CPU seconds of each selection on the unchanged source, one test file at a time.

    MutantError for a file that fails there, or a selection that takes too long.
    """
    print("measuring the tests on the unchanged source", flush=True)
    selections = dict.fromkeys(m.tests for some in made.values() for m in some)
    seconds: dict[str, float] = {}
    for test, outcome in tree.measure(test for tests in selections for test in tests):
        seconds[test] = outcome.cpu_s
        if outcome.ending is not Ending.PASSED:
            raise MutantError(
                f"without any mutant, {test} {outcome.ending} at {outcome.test} after "
                f"{outcome.cpu_s:.0f} s of CPU; it would catch anything"
            )
    found = {" ".join(tests): sum(seconds[test] for test in tests) for tests in selections}
    for named, total in found.items():
        if total > CPU_LIMIT_S:
            raise MutantError(f"{named} takes {total:.0f} s of CPU (at most {CPU_LIMIT_S:.0f})")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; see the module's docstring for the exit status."""
    chosen = options(arguments)
    preload()
    report = about_this_run(REPOSITORY, chosen.commit)  # before others commit more
    with tempfile.TemporaryDirectory(prefix="gnomon-mutation-") as folder:
        try:
            tree = Tree(REPOSITORY, Path(folder) / "tree", chosen.commit)
            made = mutants(tree, chosen)
            usual = measure(tree, made)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            found = {kind: try_all(tree, kind, some, usual) for kind, some in made.items()}
        except MutantError as error:
            print(error, file=sys.stderr)
            return 2
    before = json.loads(chosen.again.read_text("utf-8")) if chosen.again else None
    report = merged(report, found, usual, before)
    for kind in found:
        print(f"{kind}: {report[kind]}")
    if chosen.json:
        write_json(chosen.json, report)
    return 0 if is_enough(report) else 1


def try_all(
    tree: Tree, kind: str, some: Sequence[Mutant], usual: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Every mutant of a kind, one after another, told as they go; an interrupt ends them."""
    entries: list[dict[str, Any]] = []
    print(f"== {len(some)} {kind}", flush=True)
    try:
        for mutant in some:
            verdict = tree.try_mutant(mutant, usual[" ".join(mutant.tests)])
            reason = None if verdict.is_caught else equivalence(verdict, tree)
            print(line_of(verdict, reason), flush=True)
            entries.append(entry(verdict, reason))
    except KeyboardInterrupt:
        print(f"interrupted: {len(some) - len(entries)} of {len(some)} {kind} were not run")
    return entries


def is_enough(head: dict[str, Any]) -> bool:
    """Whether the tests see as much as they have to."""
    hand, generated = head["hand"], head["generated"]
    is_hand_seen = hand["caught"] + hand["equivalent"] == hand["made"]
    share = generated["share_caught"]
    return is_hand_seen and (share is None or share >= MIN_CAUGHT)


if __name__ == "__main__":
    sys.exit(main())
