"""Make mistakes, run the tests that should see them, print those that survive.

In:  options (--help). Out: exit status 0 if every hand-picked mistake and at least 90 % of the
generated ones are caught, 1 if not, 2 if a mutant or a selection does not fit the source.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.mutation import mistakes_attention, mistakes_engine, mistakes_numbers
from tools.mutation.generate import generate
from tools.mutation.mutant import Mistake, Mutant, MutantError, place
from tools.mutation.nest import Ending, Outcome, preload
from tools.mutation.report import (
    MIN_CAUGHT,
    about_this_run,
    entry,
    equivalence,
    line_of,
    summary,
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
    if chosen.only:
        made = {kind: [m for m in some if m.name in chosen.only] for kind, some in made.items()}
    return made


def measure(tree: Tree, made: dict[str, list[Mutant]]) -> dict[str, Outcome]:
    """Each selection on the unchanged source. MutantError for one that fails or takes too long."""
    found: dict[str, Outcome] = {}
    print("measuring the selections of tests on the unchanged source", flush=True)
    for tests, outcome in tree.measure(m.tests for some in made.values() for m in some):
        found[tests] = outcome
        if outcome.ending is not Ending.PASSED:
            raise MutantError(
                f"without any mutant, {tests} {outcome.ending} at {outcome.test} after "
                f"{outcome.cpu_s:.0f} s of CPU (at most {CPU_LIMIT_S:.0f}); it would catch anything"
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; see the module's docstring for the exit status."""
    chosen = options(arguments)
    preload()
    with tempfile.TemporaryDirectory(prefix="gnomon-mutation-") as folder:
        try:
            tree = Tree(REPOSITORY, Path(folder) / "tree", chosen.commit)
            made = mutants(tree, chosen)
            selections = measure(tree, made)
            head: dict[str, Any] = about_this_run(REPOSITORY, chosen.commit)
            for kind, some in made.items():
                head |= try_all(tree, kind, some)
        except MutantError as error:
            print(error, file=sys.stderr)
            return 2
    if chosen.json:
        write_json(chosen.json, head, selections)
    return 0 if is_enough(head) else 1


def try_all(tree: Tree, kind: str, some: Sequence[Mutant]) -> dict[str, Any]:
    """Every mutant of a kind, one after another, told as they go."""
    verdicts, reasons = [], []
    print(f"== {len(some)} {kind}", flush=True)
    for mutant in some:
        verdict = tree.try_mutant(mutant)
        reason = None if verdict.is_caught else equivalence(verdict, tree)
        print(line_of(verdict, reason), flush=True)
        verdicts.append(verdict)
        reasons.append(reason)
    counts = summary(verdicts, reasons)
    print(f"{kind}: {counts}", flush=True)
    entries = [entry(verdict, why) for verdict, why in zip(verdicts, reasons, strict=True)]
    return {kind: counts, f"{kind}_mutants": entries}


def is_enough(head: dict[str, Any]) -> bool:
    """Whether the tests see as much as they have to."""
    hand, generated = head["hand"], head["generated"]
    is_hand_seen = hand["caught"] + hand["equivalent"] == hand["made"]
    share = generated["share_caught"]
    return is_hand_seen and (share is None or share >= MIN_CAUGHT)


if __name__ == "__main__":
    sys.exit(main())
