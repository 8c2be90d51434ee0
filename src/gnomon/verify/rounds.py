"""Laws in rounds: once, or on ever other prompts until the time is up.

In:  laws, a Context; with a TimeBudget in it, minutes to spend.
Out: a LawResult per law. Without a budget every law runs one round. With one: first each law runs
     one round; then those with less than `settings.least_cases` cases run further ones until they
     have them; then all of them run round after round. A round that, by the laws' last ones, would
     not end in time is not begun; one in whose midst the time ends counts as far as it came.
A law that raises has failed; a law that failed is not run again. A law that had no time for enough
cases gets the verdict "too few cases", which is no pass.
Not here: the report (run.py), the laws (laws/).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gnomon.verify.budget import TimeBudget
from gnomon.verify.context import Context
from gnomon.verify.law import Law
from gnomon.verify.result import LawResult, NotRunError, OutOfTimeError, Tally
from gnomon.verify.settings import LEAST_CASES

logger = logging.getLogger(__name__)

RoundNotice = Callable[[int, float], None]  # (number of the round from 1, seconds left)


@dataclass(slots=True)
class LawRun:
    """One law's rounds so far."""

    law: Law
    least_cases: int = LEAST_CASES
    tally: Tally = field(default_factory=Tally)
    rounds: int = 0  # finished ones
    seconds: float = 0.0
    last_seconds: float = 0.0
    absence: NotRunError | None = None

    @property
    def is_settled(self) -> bool:
        """Whether another round would tell nothing: it failed, or it cannot be run."""
        return self.absence is not None or bool(self.tally.failures)

    @property
    def is_short(self) -> bool:
        """Whether cases are missing."""
        is_enough = self.rounds > 0 and self.tally.cases >= self.least_cases
        return not self.is_settled and not is_enough

    def run(self, context: Context) -> None:
        """One round."""
        context.begin(self.law.name)
        clock = time.monotonic if context.budget is None else context.budget.clock
        began = clock()
        try:
            context.step(0, 1)
            tally = self.law.test(context)
            self.rounds += 1
        except OutOfTimeError:
            tally = context.counted
        except NotRunError as reason:
            if not self.rounds:
                self.absence = reason
            return
        except Exception as error:  # whatever the engine raised, this law has failed
            logger.exception("law %s", self.law.name)
            tally = context.counted
            tally.failures.append(f"{type(error).__name__}: {error}")
        self.last_seconds = clock() - began
        self.seconds += self.last_seconds
        if self.rounds > 1 or self.tally.cases:
            seed = context.settings.seed
            tally.failures = [f"with --seed {seed}: {failure}" for failure in tally.failures]
        self.tally.take_in(tally)

    def result(self, has_budget: bool) -> LawResult:
        """What came of all rounds."""
        law = self.law
        if self.absence is not None:
            return LawResult(
                law=law.name,
                sentence=law.sentence,
                cases=0,
                worst=0.0,
                unit="",
                ties=0,
                choices=0,
                choice_ties=0,
                verdict=self.absence.verdict,
                detail=str(self.absence),
                rounds=0,
            )
        if not (has_budget and self.is_short):
            return self.tally.result(law.name, law.sentence, self.seconds, self.rounds)
        self.tally.note(
            f"time was up after {self.tally.cases} cases and {self.rounds} whole rounds, and "
            f"{self.least_cases} cases are the least: raise --minutes, or lower --max-length or "
            "--max-tokens"
        )
        return self.tally.unfinished(law.name, law.sentence, self.seconds, self.rounds)


def run_rounds(
    laws: Sequence[Law], context: Context, notice: RoundNotice | None = None
) -> tuple[LawResult, ...]:
    """Run the laws (module docstring)."""
    runs = [LawRun(law, context.settings.least_cases) for law in laws]
    number = 0
    while True:
        context.begin_round(number)
        number += 1
        if notice is not None and context.budget is not None:
            notice(number, max(0.0, context.budget.seconds_left))
        if not _run_round(runs, context, is_first=number == 1) or context.budget is None:
            break
    return tuple(run.result(context.budget is not None) for run in runs)


def _run_round(runs: Sequence[LawRun], context: Context, is_first: bool) -> bool:
    """One round of those laws whose turn it is; whether there was any."""
    has_run = False
    is_topping_up = not is_first and any(run.is_short for run in runs)
    for run in runs:
        if not is_first and not _is_due(run, context.budget, is_topping_up):
            continue
        if context.budget is not None and context.budget.is_over:
            break
        run.run(context)
        has_run = True
    return has_run


def _is_due(run: LawRun, budget: TimeBudget | None, is_topping_up: bool) -> bool:
    if run.is_settled or budget is None:
        return False
    if is_topping_up:
        return run.is_short
    return run.last_seconds <= budget.seconds_left
