"""Run the laws and report.

In:  VerifySettings, a callback for progress.
Out: a Report: results, settings, versions and machine; `exit_status` for the command line; plain
     values for JSON. A law that raises has failed, and the others go on.
Errors: ConfigError before the first law if the model, a flag or a law's name is wrong.
Not here: tables (cli/verify.py).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from gnomon.verify.budget import Clock, TimeBudget
from gnomon.verify.compiled_first import compile_first
from gnomon.verify.context import Context, Progress
from gnomon.verify.law import Law
from gnomon.verify.laws import choose_laws
from gnomon.verify.result import LawResult, Verdict
from gnomon.verify.rounds import LawRun, RoundNotice, run_rounds
from gnomon.verify.settings import VerifySettings
from gnomon.verify.surroundings import surroundings

FAILED = 1
INCOMPLETE = 3  # 2 is a wrong command line


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found, and where."""

    settings: VerifySettings
    model: str
    results: tuple[LawResult, ...]
    surroundings: dict[str, Any]
    seconds: float
    conditions: tuple[str, ...] = ()  # of the model as it was run

    @property
    def exit_status(self) -> int:
        """0 if every law passed, 1 if one failed, 3 if none failed but some were not run.

        A law that does not apply counts neither way; one that had too few cases is not run.
        """
        verdicts = {result.verdict for result in self.results}
        if Verdict.FAIL in verdicts:
            return FAILED
        if verdicts & {Verdict.NOT_RUN, Verdict.TOO_FEW}:
            return INCOMPLETE
        return 0 if Verdict.PASS in verdicts else INCOMPLETE

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        settings = self.settings
        return {
            "model": self.model,
            "verdict": {0: "pass", FAILED: "FAIL", INCOMPLETE: "incomplete"}[self.exit_status],
            "seconds": round(self.seconds, 1),
            "settings": {one.name: getattr(settings, one.name) for one in fields(settings)},
            "sizes": asdict(settings.sizes),
            **self.surroundings,
            "conditions": list(self.conditions),
            "laws": [result.as_json() for result in self.results],
        }


def run_laws(
    settings: VerifySettings,
    progress: Progress | None = None,
    notice: RoundNotice | None = None,
    clock: Clock = time.monotonic,
) -> Report:
    """Run the laws that the settings name: once, or in rounds for as long as they say."""
    laws = choose_laws(settings.laws)
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    budget = None if settings.minutes is None else TimeBudget(settings.minutes, clock)
    context = Context(settings, progress, budget=budget)
    context.survey()  # refuses what cannot run before anything is loaded
    began = time.monotonic()
    compile_first(context)
    results = run_rounds(laws, context, notice)
    return Report(
        settings=settings,
        model=context.source.label,
        results=results,
        surroundings=surroundings(),
        seconds=time.monotonic() - began,
        conditions=_conditions(context),
    )


def run_law(law: Law, context: Context) -> LawResult:
    """One law's result after one round; a law that cannot run, or that raises, has one too."""
    one = LawRun(law)
    one.run(context)
    return one.result(has_budget=False)


def _conditions(context: Context) -> tuple[str, ...]:
    """What a reader has to know about the model as it was run."""
    found = []
    resolved = context.survey().resolved
    found.append(f"cache: {resolved.latent_layout.id}, {resolved.index_layout.id}")
    if context.widths:
        fields = ", ".join(f"{name} = {value}" for name, value in context.widths.items())
        found.append(f"random weights drawn for {context.settings.kv_layout}: {fields}")
    return tuple(found)
