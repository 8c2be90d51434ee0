"""Two engine configurations over the same prompts, prompt by prompt.

In:  VerifySettings, two arms, a tolerance (None: by what the arms compute with).
Out: PromptResults: equal, a tie, or the first difference with its margin.
Arms of one precision (same dtype, cache layouts and kind of weights) have to agree as two runs of
one engine do: both run free, and the rule of margins.py holds, cached values and all; with 16 bits
or FP8 weights everything is replayed, and the rule of rough_comparison.py holds.
Arms of two precisions choose otherwise for good reasons, and each other choice changes everything
after it. So the second arm runs over the tokens of the first with its key lists and experts, and
every row's logits are compared: their root mean square difference has to stay within the tolerance
(`precision_tolerance`), and a greedy token may change only where the first arm's two best logits
are closer than WIDEST times the difference that is allowed.
Not here: how arms are written (arm_flags.py), tables (cli).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gnomon.errors import ConfigError
from gnomon.verify.context import MATES, Arm, Context
from gnomon.verify.engines import Capture
from gnomon.verify.law import replay_of
from gnomon.verify.margins import AMONG_OURS, Comparison, Kind, Tolerances, compare
from gnomon.verify.prompts import Prompt, draw_prompts
from gnomon.verify.rough_comparison import best_gap, compare_rough, row_differences
from gnomon.verify.roughness import FP8, FP8_TOLERANCE, HALF_TOLERANCE, WIDEST
from gnomon.verify.trace import Replay, Staging, Trace, cache_of, recording_of

NUM_PROMPTS = 20


class Outcome(StrEnum):
    """Of one prompt."""

    EQUAL = "equal"
    TIE = "tie"
    DIFFERS = "DIFFERS"


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt. `worst`: the largest difference of a logit in arms of one exact precision. In
    arms that round or of two precisions it is that of a row, against a server that of all rows: a
    root mean square at logits of standard deviation 1.

    `position`, `margin`: of the first difference, None where there is none.
    """

    number: int
    num_prompt: int
    num_compared: int  # rows
    outcome: Outcome
    worst: float
    position: int | None = None
    margin: float | None = None
    detail: str = ""


def precision_tolerance(context: Context, arms: Sequence[Arm]) -> float | None:
    """What two precisions may differ by; None where both arms have the same."""
    both = [context.survey(arm).resolved for arm in arms]
    first, second = ((r.dtype, r.latent_layout, r.index_layout, r.has_fp8) for r in both)
    if first == second:
        return None
    if any(r.has_fp8 for r in both):
        return FP8.logits
    is_fp8 = any(r.latent_layout.stored_dtype.itemsize == 1 for r in both)
    return FP8_TOLERANCE if is_fp8 else HALF_TOLERANCE


def allowed_difference(
    context: Context, arms: Sequence[Arm], tolerance: float | None
) -> tuple[float, bool]:
    """What the arms may differ by, ``tolerance`` if given; whether they are of two precisions."""
    across = precision_tolerance(context, arms)
    rough = context.roughness(arms[0])
    alike = AMONG_OURS.logits if rough is None else rough.logits
    default = alike if across is None else across
    return default if tolerance is None else tolerance, across is not None


def compare_arms(
    context: Context, arms: tuple[Arm, Arm], tolerance: float | None = None
) -> list[PromptResult]:
    """Run both arms and compare them."""
    context.begin("arms")
    count = context.settings.prompts or NUM_PROMPTS
    prompts = draw_prompts(context.rule, count, context.settings.seed, "arms")
    limit, is_across = allowed_difference(context, arms, tolerance)
    _require_visible(context, arms, is_across)
    found: list[PromptResult] = []
    for first in range(0, len(prompts), MATES):
        group = {str(first + i): prompt for i, prompt in enumerate(prompts[first : first + MATES])}
        expected = _free(context, arms[0], group, Replay())
        context.step(len(found), len(prompts))
        if is_across:
            found += [
                _other_precision(context, arms[1], trace, limit) for trace in expected.values()
            ]
        else:
            found += _same_precision(context, arms[1], group, expected, Tolerances(limit))
        context.step(len(found), len(prompts))
    return found


def _require_visible(context: Context, arms: Sequence[Arm], is_across: bool) -> None:
    """ConfigError for captured steps where choices would have to be replayed."""
    captured = [arm for arm in arms if arm.capture is not Capture.NONE]
    if not captured:
        return
    rounds = [context.cache_rounds(arm) or context.roughness(arm) is not None for arm in arms]
    if is_across or any(rounds):
        raise ConfigError(
            f"arm {captured[0].label!r}: within a captured step no choice can be replayed, and "
            "arms that round, or of two precisions, need that. The law 'graphs' compares captured "
            "with eager steps one by one: gnomon verify --laws graphs"
        )


def _free(
    context: Context, arm: Arm, group: Mapping[str, Prompt], replay: Replay
) -> dict[str, Trace]:
    requests = [context.request(name, prompt) for name, prompt in group.items()]
    return context.run(arm, requests, Staging(replay=replay))


def _same_precision(
    context: Context,
    arm: Arm,
    group: Mapping[str, Prompt],
    expected: Mapping[str, Trace],
    limits: Tolerances,
) -> list[PromptResult]:
    if any(trace.roughness is not None for trace in expected.values()):
        given = _free(context, arm, group, replay_of(expected))
        return [_rough(trace, given[name], limits.logits) for name, trace in expected.items()]
    is_seen = arm.capture is Capture.NONE
    cache = cache_of(expected)
    found = _free(context, arm, group, Replay(cache=cache))
    compared = {name: compare(trace, found[name], limits) for name, trace in expected.items()}
    again: Mapping[str, Trace] = {}
    if is_seen and any(one.is_tie and expected[name].keys for name, one in compared.items()):
        again = _free(context, arm, group, Replay(recording_of(expected), cache))
    results = []
    for name, free in compared.items():
        last = compare(expected[name], again[name], limits) if free.is_tie and again else free
        results.append(_judged(expected[name], free, last))
    return results


def _rough(expected: Trace, found: Trace, limit: float) -> PromptResult:
    """Of arithmetic that rounds: all that the first arm showed was replayed in the second."""
    assert expected.roughness is not None
    compared = compare_rough(expected, found, replace(expected.roughness, logits=limit))
    return _judged(expected, compared, compared)


def _judged(expected: Trace, free: Comparison, last: Comparison) -> PromptResult:
    """`last`: the replayed comparison where the free one was a tie."""
    shown = last.faults or free.divergences
    outcome = Outcome.EQUAL
    if last.faults:
        outcome = Outcome.DIFFERS
    elif free.is_tie:
        outcome = Outcome.TIE
    first = min(shown, key=lambda one: one.position, default=None)
    detail = "" if first is None else str(first)
    if outcome is Outcome.DIFFERS and free.is_tie:
        detail += " (a tie, replayed, still differs)"
    return PromptResult(
        number=int(expected.name),
        num_prompt=expected.num_prompt,
        num_compared=len(expected.logits),
        outcome=outcome,
        worst=last.worst,
        position=None if first is None else first.position,
        margin=None if first is None or first.kind is Kind.LOGITS else first.margin,
        detail=detail,
    )


def _other_precision(context: Context, arm: Arm, expected: Trace, limit: float) -> PromptResult:
    """The second arm over the first one's tokens, with its choices; row by row."""
    name = expected.name
    given = replace(expected, cached={})  # what it caches is what is tested
    request = context.request(name, expected.tokens[:-1], max_tokens=1)
    staging = Staging(replay=Replay(recording_of({name: given})))
    found = context.run(arm, [request], staging)[name]
    ours, theirs = expected.logits, found.logits[: len(expected.logits)]
    rms, gap = row_differences(ours, theirs), best_gap(ours)
    is_other = ours.argmax(-1) != theirs.argmax(-1)
    is_fault = (rms > limit) | (is_other & (gap > WIDEST * limit))
    outcome = Outcome.TIE if bool(is_other.any()) else Outcome.EQUAL
    outcome = Outcome.DIFFERS if bool(is_fault.any()) else outcome
    rows = (is_fault if outcome is Outcome.DIFFERS else is_other).nonzero()[:, 0]
    row = int(rows[0]) if len(rows) else None
    detail = "" if row is None else f"logits off by {float(rms[row]):.3g} (allowed {limit:.3g})"
    if row is not None and bool(is_other[row]):
        detail += f", greedy token {int(theirs[row].argmax())} instead of {int(ours[row].argmax())}"
    return PromptResult(
        number=int(name),
        num_prompt=expected.num_prompt,
        num_compared=len(rms),
        outcome=outcome,
        worst=float(rms.max()),
        position=row,
        margin=None if row is None else float(gap[row]),
        detail=detail,
    )
