"""Put each mutant into a private copy of the tree and see whether its tests fail.

In:  the repository (or a commit of it), mutants. Out: a `Verdict` per mutant.
A selection counts only if its files pass on the unchanged source, together within the limit; else
it would catch everything. A failure there is an error of the run, not a mutant that was caught.
Not here: the report (report.py), where mutants come from.
"""

from __future__ import annotations

import compileall
import io
import py_compile
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.mutation.mutant import Mutant, MutantError
from tools.mutation.nest import Ending, Outcome, run_tests

FOLDERS = ("src", "tests", "pyproject.toml")
CPU_LIMIT_S = 60.0
LOOPS_FROM, LOOPS_FROM_S = 3, 5.0  # tests that take so many times the usual CPU, and this, loop


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one mutant."""

    mutant: Mutant
    outcome: Outcome

    @property
    def is_caught(self) -> bool:
        return self.outcome.ending in (Ending.FAILED, Ending.LOOPED)


class Tree:
    """A private copy of sources and tests, in which one file at a time is changed."""

    def __init__(self, repository: Path, folder: Path, commit: str | None) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        if commit is None:
            for name in FOLDERS:
                source = repository / name
                if source.is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(source, folder / name, ignore=ignored)
                else:
                    shutil.copy2(source, folder / name)
        else:
            packed = subprocess.run(
                ["git", "archive", commit, *FOLDERS],
                cwd=repository, check=True, capture_output=True,
            ).stdout  # fmt: skip
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(folder, filter="data")
        # Bytecode is matched to the source by its hash: by time and size alone, a mutant of the
        # same length that is written in the same second would run as the unchanged module.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "src", quiet=1, invalidation_mode=mode)

    def read(self, path: str) -> str:
        """The unchanged text of a file. MutantError if there is no such file."""
        file = self.folder / path
        if not file.is_file():
            raise MutantError(f"{path} is not in the tree")
        return file.read_text(encoding="utf-8")

    def try_mutant(self, mutant: Mutant, usual_s: float) -> Verdict:
        """Change, test, put back. ``usual_s``: what the tests take on the unchanged source."""
        file, source = self.folder / mutant.path, self.read(mutant.path)
        file.write_text(mutant.apply(source), encoding="utf-8")
        try:
            limit_s = min(CPU_LIMIT_S, LOOPS_FROM_S + LOOPS_FROM * usual_s)
            return Verdict(mutant, run_tests(self.folder, mutant.tests, limit_s))
        finally:
            file.write_text(source, encoding="utf-8")

    def measure(self, tests: Iterable[str]) -> Iterator[tuple[str, Outcome]]:
        """(argument, outcome) of each distinct pytest argument on the unchanged source."""
        for test in dict.fromkeys(tests):
            yield test, run_tests(self.folder, (test,), CPU_LIMIT_S, writes_bytecode=True)
