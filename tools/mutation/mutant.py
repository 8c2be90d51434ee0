"""`Mutant`: one mistake put into one file, as an edit of its text.

In:  a file of the tree, character offsets, the text that stands there and the text instead.
Out: the mutated source; a MutantError where the text is not (or no longer) what the mutant says.
Not here: where mutants come from (mistakes_*.py, generate.py), whether tests see them (trial.py).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass


class MutantError(Exception):
    """A mutant does not fit the source; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake picked by hand: ``snippet``, which occurs once in ``path``, becomes ``instead``.

    ``tests``: pytest arguments (files or test ids) that have to see it.
    """

    name: str
    kind: str
    path: str
    snippet: str
    instead: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """``before`` at ``start`` of the file becomes ``after``; ``tests`` in the order to be run."""

    name: str
    kind: str
    path: str
    line: int
    start: int
    before: str
    after: str
    tests: tuple[str, ...]

    def apply(self, source: str) -> str:
        """The mutated source. MutantError if ``before`` is not there, or if it does not parse."""
        stop = self.start + len(self.before)
        if source[self.start : stop] != self.before:
            raise MutantError(
                f"{self.name}: {self.path} has {source[self.start : stop]!r} where the mutant "
                f"replaces {self.before!r}"
            )
        changed = source[: self.start] + self.after + source[stop:]
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise MutantError(f"{self.name}: {self.path} does not parse with it: {error}") from None
        return changed


def place(mistake: Mistake, source: str) -> Mutant:
    """The mistake in this source. MutantError unless its snippet is there exactly once."""
    found = source.count(mistake.snippet)
    if found != 1:
        what = "is not found" if found == 0 else f"is found {found} times"
        raise MutantError(
            f"{mistake.name}: snippet {mistake.snippet!r} {what} in {mistake.path}; "
            "write it anew after the code, so that it occurs exactly once"
        )
    start = source.index(mistake.snippet)
    return Mutant(
        name=mistake.name,
        kind=mistake.kind,
        path=mistake.path,
        line=source.count("\n", 0, start) + 1,
        start=start,
        before=mistake.snippet,
        after=mistake.instead,
        tests=mistake.tests,
    )
