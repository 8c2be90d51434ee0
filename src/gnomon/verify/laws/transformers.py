"""transformers = gnomon: by logits on every row, by key lists and experts, by greedy tokens.

One study serves the three laws: gnomon answers the prompts in batches of eight, as a server would;
then transformers runs over prompt and answer. Where a choice was a tie, gnomon runs again over the
same tokens with the choices of transformers replayed, and has to agree on every row.
GLM: gnomon's latent norms take eps 1e-6 for this, as transformers' do (oracle_math.md §3.6 item 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from gnomon.models.config import Family
from gnomon.verify.context import Arm, Context
from gnomon.verify.law import Law, describe
from gnomon.verify.margins import AGAINST_TRANSFORMERS, Comparison, Kind, compare
from gnomon.verify.oracle import LATENT_EPS, TransformersOracle, open_oracle
from gnomon.verify.prompts import Prompt, draw_prompts
from gnomon.verify.result import NotApplicableError, Tally
from gnomon.verify.trace import Replay, Staging, Trace, drive, recording_of

BATCH = 8


@dataclass(frozen=True, slots=True)
class Study:
    """What was seen of one prompt: the comparison, and the replayed one where it was a tie."""

    trace: Trace  # of transformers, without logits and choices
    free: Comparison
    replayed: Comparison | None


def transformers_arm(context: Context) -> Arm:
    """The engine that is compared: in its natural state, but for GLM's latent eps."""
    flags: dict[str, object] = {"enable_prefix_caching": True}
    if context.config.model_type is Family.GLM_MOE_DSA:
        flags["hf_overrides"] = {"latent_norm_eps": LATENT_EPS}
    return Arm(flags)


def note_conditions(context: Context, tally: Tally) -> None:
    """Say under which conditions the comparison holds."""
    if context.config.model_type is Family.GLM_MOE_DSA:
        tally.note("latent_norm_eps = 1e-6, as transformers has it")
    if context.longest <= context.config.index_topk:
        tally.note(
            f"no prompt is longer than index_topk = {context.config.index_topk}, so selection is "
            "not tested: raise --max-length"
        )


def require_exact_cache(context: Context, arm: Arm) -> None:
    """Raise NotApplicableError where the cache rounds: transformers has no such cache."""
    resolved = context.survey(arm).resolved
    if resolved.has_fp8:
        raise NotApplicableError(
            "transformers multiplies dequantised weights, and here rows are rounded to FP8 too: "
            "--weights dequantise, or the law 'reference'"
        )
    if context.cache_rounds(arm):
        layout = resolved.latent_layout.id
        raise NotApplicableError(
            f"transformers keeps its cache in full precision, and {layout} rounds; the law "
            "'reference' compares over the same layout"
        )


def study(context: Context) -> list[Study]:
    """Run and compare all prompts, once per context."""
    if context.roughness() is not None:
        dtype = context.settings.dtype
        raise NotApplicableError(
            f"free runs in {dtype} choose otherwise at close scores; the laws "
            "'transformers_bfloat16' and 'reference' replay the choices"
        )
    require_exact_cache(context, transformers_arm(context))
    return context.once("transformers", lambda: _study(context))


def _study(context: Context) -> list[Study]:
    count, seed = context.sizes.prompts, context.settings.seed
    prompts = draw_prompts(context.rule, count, seed, "transformers")
    found: list[Study] = []
    is_exported = bool(context.overrides)  # transformers reads the file, not the overrides
    with open_oracle(context.source, torch.float32, is_exported=is_exported) as oracle:
        for first in range(0, len(prompts), BATCH):
            found += _study_batch(context, oracle, prompts[first : first + BATCH], first)
            context.step(len(found), len(prompts))
    return found


def _study_batch(
    context: Context, oracle: TransformersOracle, prompts: Sequence[Prompt], first: int
) -> list[Study]:
    arm = transformers_arm(context)
    requests = [context.request(f"{first + i}", prompt) for i, prompt in enumerate(prompts)]
    ours = context.run(arm, requests)
    studied = []
    for name, mine in ours.items():
        theirs = oracle.trace(name, mine.tokens, mine.num_prompt)
        free = compare(theirs, mine, AGAINST_TRANSFORMERS)
        replayed = None
        if free.is_tie:
            again = replay(context, arm, theirs, mine.tokens)
            replayed = compare(theirs, again, AGAINST_TRANSFORMERS)
        told = replace(theirs, logits=theirs.logits[:0], keys={}, experts={})  # the rest is large
        studied.append(Study(told, free, replayed))
    return studied


def replay(context: Context, arm: Arm, theirs: Trace, tokens: Sequence[int]) -> Trace:
    """Run gnomon over given tokens (all but the last) with the choices of `theirs`."""
    request = context.request("again", tuple(tokens[:-1]), max_tokens=1)
    staging = Staging(replay=Replay(recording_of({"again": theirs})))
    trace = drive(context.engine(arm), [request], staging)["again"]
    chosen = trace.logits[theirs.num_prompt - 1 :].argmax(-1).tolist()
    tokens = (*tokens[: theirs.num_prompt], *chosen)
    return Trace("again", theirs.num_prompt, tokens, trace.logits, trace.is_computed)


def _tally(context: Context, kinds: frozenset[Kind], unit: str) -> Tally:
    tally = context.tally(unit)
    note_conditions(context, tally)
    studied = study(context)
    for seen in studied:
        last = seen.replayed or seen.free
        faults = [fault for fault in last.faults if fault.kind in kinds]
        how = " (a tie, replayed, still differs)" if seen.replayed else ""
        failure = f"{describe(seen.trace)}{how}: {faults[0]}" if faults else None
        is_tie = Kind.TOKEN in kinds and seen.free.is_token_tie
        tally.add(last.worst if Kind.LOGITS in kinds else 0.0, is_tie=is_tie, failure=failure)
        if Kind.KEYS in kinds:
            tally.add_choices(seen.free.num_choices, seen.free.num_choice_ties)
    num_replayed = sum(seen.replayed is not None for seen in studied)
    if num_replayed:
        tally.count("prompts with tied choices replayed", num_replayed)
    return tally


def _law(name: str, sentence: str, *kinds: Kind) -> Law:
    unit = "logit" if Kind.LOGITS in kinds else ""
    return Law(name, sentence, partial(_tally, kinds=frozenset(kinds), unit=unit))


LAWS = (
    _law(
        "transformers_logits",
        "transformers = gnomon by the logits of every row, in float32",
        Kind.LOGITS,
    ),
    _law(
        "transformers_choices",
        "transformers = gnomon by every layer's key lists and experts",
        Kind.KEYS,
        Kind.EXPERTS,
    ),
    _law(
        "transformers_tokens",
        "transformers = gnomon by greedy tokens",
        Kind.TOKEN,
    ),
)
