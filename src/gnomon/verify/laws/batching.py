"""Alone = in any company = in any portions: mates, chunks, padding, and how scores are cut.

Each prompt's run alone, whole and cold is the reference. Then the same requests run with 1, 7 and
31 mates that come and go at other times; with prompts computed 1, 7 or 64 tokens at a time; with
steps padded to other multiples; and with scores and context cut into the smallest pieces.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from gnomon.attention.plan import Budget
from gnomon.verify.context import MATES, Arm, Context
from gnomon.verify.law import Law, check_arm
from gnomon.verify.prompts import Prompt
from gnomon.verify.result import Tally
from gnomon.verify.trace import Replay, Staging, Trace

COMPANIES = (2, 8, 32)  # a request and its 1, 7, 31 mates
CHUNKS = (1, 7, 64)
PADDINGS = (16, 48)  # the default is 1: none
LAST_ARRIVAL = 40  # steps
FEW_ROWS = 8  # that a chunk of scores holds in the law of pieces


def check_in_groups(
    context: Context,
    tally: Tally,
    arm: Arm,
    prompts: Sequence[Prompt],
    arrivals: Mapping[str, int] | None = None,
) -> None:
    """Compare prompts with their references, run through one engine in groups of MATES."""
    for first in range(0, len(prompts), MATES):
        group = prompts[first : first + MATES]
        check_group(context, tally, arm, group, arrivals)
        context.step(first, len(prompts))


def check_group(
    context: Context,
    tally: Tally,
    arm: Arm,
    prompts: Sequence[Prompt],
    arrivals: Mapping[str, int] | None = None,
) -> None:
    """Compare prompts, run at the same time, with their references."""
    names = [str(number) for number in range(len(prompts))]
    requests = [context.request(name, prompt) for name, prompt in zip(names, prompts, strict=True)]

    def run(replay: Replay) -> Mapping[str, Trace]:
        return context.run(arm, requests, Staging(arrivals or {}, replay))

    check_arm(tally, dict(zip(names, context.reference(prompts), strict=True)), run)


def _company(context: Context) -> Tally:
    tally = context.tally()
    prompts = context.engine_prompts()
    for size in COMPANIES:
        rng = random.Random(f"{context.settings.seed}:company:{size}")
        arrivals = {str(number): rng.randint(0, LAST_ARRIVAL) for number in range(size)}
        places = list(range(len(prompts)))
        rng.shuffle(places)
        num_groups = max(1, len(prompts) // size)
        for group in range(num_groups):
            chosen = [prompts[places[(group * size + i) % len(prompts)]] for i in range(size)]
            check_group(context, tally, Arm(), chosen, arrivals)
            context.step(group, num_groups)
    return tally


def _chunks(context: Context) -> Tally:
    tally = context.tally()
    for chunk in CHUNKS:
        arm = Arm({"max_prefill_chunk": chunk})
        check_in_groups(context, tally, arm, context.engine_prompts())
    return tally


def _padding(context: Context) -> Tally:
    tally = context.tally()
    for rows in PADDINGS:
        check_in_groups(context, tally, Arm(rows=rows), context.engine_prompts())
    return tally


def _pieces(context: Context) -> Tally:
    """Scores of a few rows and one page at a time; dense context page by page."""
    tally = context.tally()
    dims, page = context.config.attention_dims(), context.block_size
    floats = page * (FEW_ROWS * (1 + dims.index_num_heads) + dims.index_head_dim)
    budget = Budget(score_bytes=4 * floats, context_rows=page)
    tally.note(f"scores cut to {budget.score_bytes} bytes, context to {page} keys")
    arm = Arm({"dense_route": "always_when_allowed"}, budget=budget)
    check_in_groups(context, tally, arm, context.engine_prompts())
    return tally


LAWS = (
    Law("company", "alone = batched with 1, 7 and 31 mates", _company),
    Law("chunks", "prompts in chunks of 1, 7 and 64 tokens = whole", _chunks),
    Law("padding", "steps padded to 16 and 48 rows = unpadded", _padding),
    Law("pieces", "scores and context cut into the smallest pieces = whole", _pieces),
)
