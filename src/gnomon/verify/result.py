"""What came of a law: counts, the worst difference, the verdict, and what failed.

In:  a law adds its cases to a `Tally`.
Out: `LawResult`, frozen, plain values (JSON-ready by `as_json`).
The verdict is decided here and nowhere else: a failure fails; so does a law without a single case,
which proves nothing; so do ties. A case whose tokens came out otherwise for a tied choice is a tie:
at most 2 % of the cases (design.md §9). A choice of keys or experts (one row of one layer) may be
tied without changing a token: at most 1 in 10,000, where 0.4 are expected for an error of 1e-6 in
scores of unit scale (oracle_math.md §3.2). One tie is always allowed: in a short run no smaller
share could be told.
Not here: what a case is (laws/), what a tie is (margins.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

MAX_TIE_SHARE = 0.02
MAX_CHOICE_TIE_SHARE = 1e-4
MAX_SHOWN = 5


class Verdict(StrEnum):
    """NOT_RUN says that nothing is known, and `detail` why.

    NOT_APPLICABLE: the law says nothing about such a model or cache. TOO_FEW: what was run holds,
    but time was up before it was enough.
    """

    PASS = "pass"
    FAIL = "FAIL"
    NOT_RUN = "not run"
    NOT_APPLICABLE = "not applicable"
    TOO_FEW = "too few cases"


class NotRunError(Exception):
    """Raised by a law that cannot be run here; the message says why and what would help."""

    verdict = Verdict.NOT_RUN


class NotApplicableError(NotRunError):
    """Raised by a law that has nothing to say about this model or cache."""

    verdict = Verdict.NOT_APPLICABLE


class OutOfTimeError(Exception):
    """Raised out of a law in whose midst the time is up; what it has counted so far stays."""


@dataclass(frozen=True, slots=True)
class LawResult:
    """One law's outcome. `worst` is in `unit`; the first few `failures` are kept in words.

    `rounds`: how often it was run, each time on other prompts.
    """

    law: str
    sentence: str
    cases: int
    worst: float
    unit: str
    ties: int
    choices: int
    choice_ties: int
    verdict: Verdict
    detail: str
    failures: tuple[str, ...] = ()
    num_failures: int = 0
    seconds: float = 0.0
    rounds: int = 1

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"verdict": str(self.verdict)}


@dataclass(slots=True)
class Tally:
    """Cases of one law as they come."""

    unit: str = "logit"
    cases: int = 0
    worst: float = 0.0
    ties: int = 0
    choices: int = 0
    choice_ties: int = 0
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, worst: float = 0.0, *, is_tie: bool = False, failure: str | None = None) -> None:
        """One case."""
        self.cases += 1
        self.worst = max(self.worst, worst)
        self.ties += is_tie
        if failure is not None:
            self.failures.append(failure)

    def add_choices(self, num_choices: int, num_ties: int) -> None:
        """Choices of keys and experts that were compared, and how many were ties."""
        self.choices += num_choices
        self.choice_ties += num_ties

    def require(self, claim: bool, failure: str) -> None:
        """A condition without which the law was not put to the test: not a case, but a failure."""
        if not claim:
            self.failures.append(failure)

    def note(self, text: str) -> None:
        """A remark for the table."""
        if text not in self.notes:
            self.notes.append(text)

    def count(self, what: str, number: int) -> None:
        """A number for the table; those of several rounds are added up."""
        self.counts[what] = self.counts.get(what, 0) + number

    def take_in(self, other: Tally) -> None:
        """Add the cases of another round of the same law."""
        self.unit = other.unit
        self.cases += other.cases
        self.worst = max(self.worst, other.worst)
        self.ties += other.ties
        self.choices += other.choices
        self.choice_ties += other.choice_ties
        self.failures += other.failures
        for text in other.notes:
            self.note(text)
        for what, number in other.counts.items():
            self.count(what, number)

    def result(self, law: str, sentence: str, seconds: float = 0.0, rounds: int = 1) -> LawResult:
        """The verdict (module docstring)."""
        failures = self._judged()
        verdict = Verdict.FAIL if failures else Verdict.PASS
        return self._result(law, sentence, verdict, failures, (seconds, rounds))

    def unfinished(self, law: str, sentence: str, seconds: float, rounds: int) -> LawResult:
        """The result of a law that time ran out on: a failure if there is one, else too few."""
        failures = list(self.failures)
        verdict = Verdict.FAIL if failures else Verdict.TOO_FEW
        return self._result(law, sentence, verdict, failures, (seconds, rounds))

    def _judged(self) -> list[str]:
        """All failures, those of the whole among them."""
        failures = list(self.failures)
        if not self.cases and not failures:
            failures.append("no case was run, so nothing is shown")
        if self.ties > max(1, MAX_TIE_SHARE * self.cases):
            failures.append(f"{self.ties} ties in {self.cases} cases are more than 2 %")
        if self.choice_ties > max(1, MAX_CHOICE_TIE_SHARE * self.choices):
            failures.append(
                f"{self.choice_ties} of {self.choices} choices of keys and experts are tied, more "
                "than 1 in 10,000"
            )
        return failures

    def _result(
        self,
        law: str,
        sentence: str,
        verdict: Verdict,
        failures: list[str],
        spent: tuple[float, int],
    ) -> LawResult:
        return LawResult(
            law=law,
            sentence=sentence,
            cases=self.cases,
            worst=self.worst,
            unit=self.unit,
            ties=self.ties,
            choices=self.choices,
            choice_ties=self.choice_ties,
            verdict=verdict,
            detail="; ".join(
                [*(f"{number} {what}" for what, number in self.counts.items()), *self.notes]
            ),
            failures=tuple(failures[:MAX_SHOWN]),
            num_failures=len(failures),
            seconds=spent[0],
            rounds=spent[1],
        )
