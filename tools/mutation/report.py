"""What a mutation run found: a line per mutant, the survivors, and a JSON file.

In:  verdicts and the seconds of each selection. Out: text on the terminal; a JSON object with the
machine, the date, the command, and per mutant its edit, verdict, seconds and the test that failed.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.mutation.equivalents import EQUIVALENTS
from tools.mutation.nest import Ending
from tools.mutation.trial import Tree, Verdict

MIN_CAUGHT = 0.9  # of the generated ones


def equivalence(verdict: Verdict, tree: Tree) -> str | None:
    """Why no test can see this mutant, if somebody has looked and said so."""
    mutant = verdict.mutant
    line = tree.read(mutant.path).splitlines()[mutant.line - 1].strip()
    return EQUIVALENTS.get((mutant.path, line, mutant.before, mutant.after))


def word(verdict: Verdict, reason: str | None) -> str:
    """caught, caught (loops), equivalent, SURVIVED or UNSETTLED."""
    match verdict.outcome.ending:
        case Ending.FAILED:
            return "caught"
        case Ending.LOOPED:
            return "caught (loops)"
        case Ending.UNSETTLED:
            return "UNSETTLED"
        case Ending.PASSED:
            return "SURVIVED" if reason is None else "equivalent"


def line_of(verdict: Verdict, reason: str | None) -> str:
    """One line for the terminal."""
    mutant, outcome = verdict.mutant, verdict.outcome
    what = f"{word(verdict, reason):<14} {outcome.cpu_s:5.1f} s  {mutant.name}: {mutant.kind}"
    return f"{what}  [{reason or outcome.test}]"


def summary(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of one kind of mutants; the share leaves equivalent ones out."""
    words = [one["verdict"] for one in entries]
    num_caught = words.count("caught") + words.count("caught (loops)")
    num_real = len(words) - words.count("equivalent")
    return {
        "made": len(words),
        "caught": num_caught,
        "equivalent": words.count("equivalent"),
        "survived": words.count("SURVIVED"),
        "unsettled": words.count("UNSETTLED"),
        "share_caught": round(num_caught / num_real, 4) if num_real else None,
        "most_cpu_s": max((one["cpu_s"] for one in entries), default=0.0),
    }


def entry(verdict: Verdict, reason: str | None) -> dict[str, Any]:
    """A mutant for the JSON file."""
    mutant, outcome = verdict.mutant, verdict.outcome
    found = {
        "name": mutant.name,
        "kind": mutant.kind,
        "path": mutant.path,
        "line": mutant.line,
        "before": mutant.before,
        "after": mutant.after,
        "verdict": word(verdict, reason),
        "test": outcome.test,
        "cpu_s": round(outcome.cpu_s, 2),
        "wall_s": round(outcome.wall_s, 2),
        "selection": " ".join(mutant.tests),
    }
    return found if reason is None else found | {"reason": reason}


def about_this_run(repository: Path, commit: str | None) -> dict[str, Any]:
    """Machine, date, command and versions."""
    named = subprocess.run(
        ["git", "rev-parse", "--short", commit or "HEAD"],
        cwd=repository, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    return {
        "command": "python -m tools.mutation " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": named if commit else f"{named} and the working tree",
        "machine": f"{_processor()}, {os.cpu_count()} logical cores, one process, one thread",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def names_done(report: Mapping[str, Any]) -> frozenset[str]:
    """Names of the mutants of a report that need not be run again."""
    every = [*report["hand_mutants"], *report["generated_mutants"]]
    return frozenset(one["name"] for one in every if one["verdict"].islower())


def merged(
    head: Mapping[str, Any],
    found: Mapping[str, Sequence[dict[str, Any]]],
    selections: Mapping[str, float],
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The whole report. ``before``: an earlier one, whose other mutants stay as they were there."""
    seconds = {tests: round(cpu_s, 2) for tests, cpu_s in selections.items()}
    report = dict(head)
    if before is not None:
        report["before"] = [*before.get("before", []), {key: before[key] for key in head}]
        seconds = before["selections_cpu_s"] | seconds
    for kind, entries in found.items():
        anew = {one["name"]: one for one in entries}
        old = [] if before is None else before[f"{kind}_mutants"]
        kept = [anew.pop(one["name"], one) for one in old]
        report[f"{kind}_mutants"] = [*kept, *anew.values()]
        report[kind] = summary(report[f"{kind}_mutants"])
    return report | {"selections_cpu_s": seconds}


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """The report as a file, counts first."""
    counts = {kind: report[kind] for kind in ("hand", "generated")}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(counts | {k: v for k, v in report.items() if k not in counts}, indent=1)
    path.write_text(text + "\n", "utf-8")
