"""Captured steps = eager ones: step by step over one cache, and whole runs.

`graphs`: requests come and go, and each captured step, of decode, of a short prompt or mixed, is
replayed by its graph and then run again, eagerly, operator by operator, over the same tokens and
the same cache. What differs was made in
that one step: a stale buffer, a padding row that leaks, a kernel that reads what the capture has
frozen. A choice at a close margin goes either way there too, and cannot be replayed within a
graph: in float32 such a row is a tie; where arithmetic or the cache rounds, as many rows may be far
off as have other experts by rounding alone (FAR_SHARE of what is allowed).
`captured`: the same requests run freely through graphs, steps queued ahead as in service, also with
shared prefixes and in a cache that is too small; tokens, and the logits that they were sampled
from, are those of each prompt alone, eagerly. Float32 and exact caches only: elsewhere free runs
part at the first close choice.
On a CPU the same work is replayed without CUDA: that tests plans, buffers and buckets.
"""

from __future__ import annotations

import random

import torch

from gnomon.engine.messages import EngineRequest
from gnomon.verify.captured import TwinStep
from gnomon.verify.context import MATES, Arm, Context
from gnomon.verify.engines import Capture, TracedCore
from gnomon.verify.law import ROUGH_UNIT, Law, describe
from gnomon.verify.laws.memory import snug
from gnomon.verify.margins import AMONG_OURS, Comparison, compare, smallest_gap
from gnomon.verify.result import NotApplicableError, Tally
from gnomon.verify.rough_comparison import best_gap, row_differences
from gnomon.verify.roughness import HALF, WIDEST, Roughness
from gnomon.verify.trace import Staging, Trace, drive

LAST_ARRIVAL = 12  # steps
FAR_SHARE = 0.5  # of Roughness.experts, which is twice what was seen
HOW = "replayed as CUDA graphs", "replayed without CUDA: plans, buffers and buckets"


def _requests(context: Context) -> tuple[list[EngineRequest], dict[str, int]]:
    """Prompts that come at other times and want other lengths, so that buckets fill and empty."""
    rng = random.Random(f"{context.settings.seed}:captured")
    most = context.sizes.max_tokens
    requests = [
        context.request(str(number), prompt, max_tokens=max(1, most - number * most // MATES))
        for number, prompt in enumerate(context.engine_prompts()[:MATES])
    ]
    arrivals = {one.request_id: rng.randint(0, LAST_ARRIVAL) for one in requests}
    return requests, arrivals


def _graphs(context: Context) -> Tally:
    arm = Arm(capture=Capture.TWIN)
    roughness = _step_roughness(context, arm)
    tally = context.tally("logit" if roughness is None else ROUGH_UNIT)
    core = context.engine(arm)
    requests, arrivals = _requests(context)
    traces = drive(core, requests, Staging(arrivals))
    assert core.captured is not None
    num_far = num_rows = 0
    for step in core.captured.twins:
        if roughness is None:
            _judge_exact(tally, step)
        else:
            num_far += _judge_rough(tally, step, roughness.logits)
        num_rows += len(step.rows)
    if roughness is not None:
        tally.count("rows far off, at a choice", num_far)
        is_rare = num_far <= max(1.0, FAR_SHARE * roughness.experts * num_rows)
        what = f"{num_far} of {num_rows} rows are off by more than {roughness.logits}"
        tally.require(is_rare, what)
    _require_replays(context, tally, core, traces)
    return tally


def _step_roughness(context: Context, arm: Arm) -> Roughness | None:
    """What one step may differ by; None where last bits are all."""
    return context.roughness(arm) or (HALF if context.cache_rounds(arm) else None)


def _judge_exact(tally: Tally, step: TwinStep) -> None:
    """Each row is a case: equal, or a tie at a close choice of its own."""
    allowed = AMONG_OURS.logits * max(1.0, float(step.eager.std()))
    off = (step.captured - step.eager).abs().amax(-1).nan_to_num(nan=torch.inf)
    recording = step.taps.recording
    for (name, position), one in zip(step.rows, off.tolist(), strict=True):
        failure, is_tie = None, False
        if one > allowed:
            kept = (*recording.index_margin.items(), *recording.expert_margin.items())
            own = [margin[: position + 1].min() for (_, owner), margin in kept if owner == name]
            margin = min(map(float, own), default=torch.inf)
            is_tie = margin <= AMONG_OURS.tie
            if not is_tie:
                failure = f"request {name}, position {position}: logits off by {one:.3g}, "
                failure += f"closest choice {margin:.3g}"
        tally.add(one if failure or one <= allowed else 0.0, is_tie=is_tie, failure=failure)


def _judge_rough(tally: Tally, step: TwinStep, limit: float) -> int:
    """The same; how many rows are far off."""
    off = row_differences(step.eager, step.captured)
    gap = best_gap(step.eager)
    is_other = step.eager.argmax(-1) != step.captured.argmax(-1)
    is_far = (off > limit) | (is_other & (gap > WIDEST * limit))
    for row, (name, position) in enumerate(step.rows):
        failure = None
        if not bool(step.captured[row].isfinite().all()):
            failure = f"request {name}, position {position}: not finite"
        tally.add(0.0 if bool(is_far[row]) else float(off[row]), failure=failure)
    return int(is_far.sum())


def _require_replays(
    context: Context, tally: Tally, core: TracedCore, traces: dict[str, Trace]
) -> None:
    """Buckets that are full, half empty and of one row were replayed, or nothing is shown."""
    assert core.captured is not None
    replays = core.captured.replays
    tally.note(HOW[0] if context.device == "cuda" else HOW[1])
    tally.count("steps replayed", len(replays) + core.captured.num_prefills)
    tally.count("of them with prompts", core.captured.num_prefills)
    is_long = any(len(trace.output) > 1 for trace in traces.values())
    tally.require(bool(replays) or not is_long, "no decode step was replayed")
    most = max((live for live, _ in replays), default=0)
    if most > 4:  # so many that some bucket has padding rows in it
        tally.require(
            any(live < bucket for live, bucket in replays), "no bucket had a padding row in it"
        )


def _captured(context: Context) -> Tally:
    arm = Arm(capture=Capture.FREE)
    if _step_roughness(context, arm) is not None:
        raise NotApplicableError(
            "free runs part at close choices where arithmetic or the cache rounds; the law "
            "'graphs' compares step by step"
        )
    tally = context.tally()
    requests, arrivals = _requests(context)
    expected = context.reference([tuple(one.prompt_token_ids) for one in requests])
    small = snug(context, [tuple(one.prompt_token_ids) for one in requests])
    ways: tuple[dict[str, object], ...] = ({}, {"enable_prefix_caching": True, **small})
    for number, flags in enumerate(ways):
        core = context.engine(Arm(flags, capture=Capture.FREE))
        found = drive(core, requests, Staging(arrivals))
        for one, trace in zip(requests, expected, strict=True):
            _judge_run(tally, trace, found[one.request_id])
        _require_replays(context, tally, core, found)
        context.step(number, len(ways))
    return tally


def _judge_run(tally: Tally, expected: Trace, found: Trace) -> None:
    """One request: equal up to its end, or up to the first close choice of the eager run."""
    compared = compare(expected, found, AMONG_OURS)
    failure = explain_unseen(expected, compared)
    is_excused = failure is None and bool(compared.faults)
    tally.add(
        0.0 if is_excused else compared.worst,
        is_tie=compared.is_token_tie or is_excused,
        failure=failure,
    )


def explain_unseen(expected: Trace, compared: Comparison) -> str | None:
    """What is wrong with a run whose choices were not seen; None if nothing, or if it is a tie."""
    if not compared.faults:
        return None
    first = min(compared.faults, key=lambda one: one.position)
    if smallest_gap((expected, expected), first.position) <= AMONG_OURS.tie:
        return None
    return f"{describe(expected)}: {first}"


LAWS = (
    Law("graphs", "a captured step = the same step run eagerly", _graphs),
    Law("captured", "runs through captured steps = eager runs, alone", _captured),
)
