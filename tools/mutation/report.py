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
from tools.mutation.nest import Ending, Outcome
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


def summary(verdicts: Sequence[Verdict], reasons: Sequence[str | None]) -> dict[str, Any]:
    """Counts of one kind of mutants; the share leaves equivalent ones out."""
    words = [word(verdict, why) for verdict, why in zip(verdicts, reasons, strict=True)]
    num_caught = sum(verdict.is_caught for verdict in verdicts)
    num_real = len(words) - words.count("equivalent")
    return {
        "made": len(words),
        "caught": num_caught,
        "equivalent": words.count("equivalent"),
        "survived": words.count("SURVIVED"),
        "unsettled": words.count("UNSETTLED"),
        "share_caught": round(num_caught / num_real, 4) if num_real else None,
        "most_cpu_s": round(max((v.outcome.cpu_s for v in verdicts), default=0.0), 2),
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


def write_json(path: Path, head: dict[str, Any], selections: Mapping[str, Outcome]) -> None:
    """The whole report; selections get the seconds that they take on unchanged source."""
    seconds = {tests: round(outcome.cpu_s, 2) for tests, outcome in selections.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | {"selections_cpu_s": seconds}, indent=1) + "\n", "utf-8")
