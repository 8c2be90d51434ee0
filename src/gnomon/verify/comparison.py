"""Two sides over the same prompts, reported: two arms, or the engine here and a server.

In:  VerifySettings, the arms as text, perhaps a server; a callback for progress.
Out: ComparisonReport: a PromptResult per prompt, what the sides are, what they may differ by; the
     exit status: 1 if a prompt differs, or if more than MAX_TIE_SHARE of all prompts are ties in
     arms of one precision; else 0.
Errors: ConfigError before anything is loaded if a flag, an arm or the server is wrong.
Not here: how they are compared (arms.py, against.py), tables (cli).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError
from gnomon.frontend.language import language_of
from gnomon.verify.against import DEFAULT_TOLERANCE, compare_with_server
from gnomon.verify.against_server import CompletionServer
from gnomon.verify.arm_flags import parse_arm
from gnomon.verify.arms import Outcome, PromptResult, allowed_difference, compare_arms
from gnomon.verify.context import Arm, Context, Progress
from gnomon.verify.result import MAX_TIE_SHARE
from gnomon.verify.settings import VerifySettings
from gnomon.verify.surroundings import surroundings

FAILED = 1
NOT_WITH = ("laws", "minutes")  # settings that mean nothing where two sides are compared


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """What a comparison found, and where. `max_tie_share`: 1 where ties are to be expected."""

    settings: VerifySettings
    model: str
    sides: tuple[str, str]
    results: tuple[PromptResult, ...]
    tolerance: float
    max_tie_share: float
    conditions: tuple[str, ...]
    surroundings: dict[str, Any]
    seconds: float

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the exit status is 1."""
        found = [
            f"prompt {one.number}: {one.detail}"
            for one in self.results
            if one.outcome is Outcome.DIFFERS
        ]
        num_ties = sum(one.outcome is Outcome.TIE for one in self.results)
        if num_ties > max(1, self.max_tie_share * len(self.results)):
            found.append(f"{num_ties} ties in {len(self.results)} prompts are more than 2 %")
        return tuple(found)

    @property
    def exit_status(self) -> int:
        """0 or 1 (module docstring)."""
        return FAILED if self.failures else 0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        settings = self.settings
        return {
            "model": self.model,
            "sides": list(self.sides),
            "verdict": "FAIL" if self.failures else "pass",
            "tolerance": self.tolerance,
            "seconds": round(self.seconds, 1),
            "settings": {one.name: getattr(settings, one.name) for one in fields(settings)},
            "sizes": asdict(settings.sizes),
            **self.surroundings,
            "conditions": list(self.conditions),
            "failures": list(self.failures),
            "prompts": [asdict(one) | {"outcome": str(one.outcome)} for one in self.results],
        }


def run_arms(
    settings: VerifySettings,
    arms: Sequence[str],
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Compare two arms."""
    if len(arms) != 2:
        raise ConfigError(
            f"--arm is given {len(arms)} times: give it twice, as --arm cp=4 --arm cp=1; one may "
            'be empty (--arm "").'
        )
    began = time.monotonic()
    first, second = (parse_arm(text) for text in arms)
    context = _context(settings, (first, second), progress)
    limit, is_across = allowed_difference(context, (first, second), tolerance)
    results = compare_arms(context, (first, second), tolerance)
    conditions = [f"{arm.label}: {_describe(context, arm)}" for arm in (first, second)]
    if is_across:
        conditions.append("two precisions: the second arm has the first one's tokens and choices")
    return ComparisonReport(
        settings=settings,
        model=context.source.label,
        sides=(first.label, second.label),
        results=tuple(results),
        tolerance=limit,
        max_tie_share=1.0 if is_across else MAX_TIE_SHARE,
        conditions=(*conditions, *_widths(context)),
        surroundings=surroundings(),
        seconds=time.monotonic() - began,
    )


def run_against(
    settings: VerifySettings,
    server: CompletionServer,
    arms: Sequence[str],
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Compare the engine here (perhaps configured by an arm) with a server."""
    if len(arms) > 1:
        raise ConfigError("--against takes one --arm at most: it configures the engine here.")
    began = time.monotonic()
    arm = parse_arm(arms[0] if arms else "")
    language = language_of(EngineConfig.of(model=settings.model))
    size = None if language is None else language.tokenizer.vocab_size
    context = _context(settings, (arm,), progress, size)
    results = compare_with_server(context, arm, server, tolerance)
    return ComparisonReport(
        settings=settings,
        model=context.source.label,
        sides=(f"here, {arm.label}", f"{server.model} at {server.url}"),
        results=tuple(results),
        tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance,
        max_tie_share=1.0,
        conditions=(
            f"here: {_describe(context, arm)}",
            f"the server was asked with {server.dialect}",
            *_widths(context),
        ),
        surroundings=surroundings(),
        seconds=time.monotonic() - began,
    )


def _context(
    settings: VerifySettings,
    arms: Sequence[Arm],
    progress: Progress | None,
    vocab_size: int | None = None,
) -> Context:
    """The context of both arms, checked: nothing is loaded yet."""
    for name in NOT_WITH:
        if getattr(settings, name) is not None:
            raise ConfigError(f"--{name} is for laws; it says nothing about --arm and --against.")
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    layouts = [str(arm.flags["kv_layout"]) for arm in arms if "kv_layout" in arm.flags]
    context = Context(settings, progress, layouts=layouts, default_vocab_size=vocab_size)
    for arm in arms:
        context.survey(arm)
    return context


def _describe(context: Context, arm: Arm) -> str:
    resolved = context.survey(arm).resolved
    layouts = f"{resolved.latent_layout.id}, {resolved.index_layout.id}"
    ranks = f", {arm.ranks} simulated ranks ({arm.strategy})" if arm.ranks > 1 else ""
    return f"{str(resolved.dtype).removeprefix('torch.')}, cache {layouts}{ranks}"


def _widths(context: Context) -> list[str]:
    if not context.widths:
        return []
    named = ", ".join(f"{name} = {value}" for name, value in context.widths.items())
    return [f"random weights drawn wider for the cache layout: {named}"]
