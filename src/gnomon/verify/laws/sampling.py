"""Sampled tokens are a function of prompt, parameters, seed and choice: not of the company.

Each prompt gets its own temperature, filters, penalties and seed. Its run alone is the reference;
then eight run together, whole, in chunks, and in a cache that is too small. A choice of n is
compared with the same choice of a request of its own.
A drawn token has no greedy margin: only a tied choice of keys or experts excuses another one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from gnomon.attention.taps import Recording
from gnomon.engine.messages import EngineRequest
from gnomon.verify.context import Arm, Context
from gnomon.verify.law import Law, check_arm
from gnomon.verify.laws.memory import just_enough
from gnomon.verify.result import Tally
from gnomon.verify.trace import Staging, Trace, drive

NUM_CHOICES = 3
NUM_FORKED = 4  # prompts whose choices are compared
GROUP = 8


def _sampling(context: Context) -> Tally:
    tally = Tally()
    rng = random.Random(f"{context.settings.seed}:sampling")
    requests = [
        context.request(str(number), prompt, seed=rng.randrange(2**40), **_wishes(rng))
        for number, prompt in enumerate(context.engine_prompts())
    ]
    core = context.engine()
    expected = {one.request_id: drive(core, [one])[one.request_id] for one in requests}
    for first in range(0, len(requests), GROUP):
        group = requests[first : first + GROUP]
        small = just_enough(context, [tuple(one.prompt_token_ids) for one in group])
        for flags in ({}, {"max_prefill_chunk": 7}, small):

            def run(
                replayed: Recording | None,
                flags: Mapping[str, object] = flags,
                group: list[EngineRequest] = group,
            ) -> Mapping[str, Trace]:
                return context.run(Arm(flags), group, Staging(replayed=replayed))

            check_arm(tally, {one.request_id: expected[one.request_id] for one in group}, run)
            context.step(first, len(requests))
    return tally


def _wishes(rng: random.Random) -> dict[str, object]:
    """Parameters of one request; every other one has penalties."""
    wishes: dict[str, object] = {
        "temperature": rng.choice((0.5, 0.8, 1.0, 1.5)),
        "top_p": rng.choice((1.0, 0.9, 0.5)),
        "top_k": rng.choice((0, 0, 20, 5)),
        "min_p": rng.choice((0.0, 0.0, 0.02)),
    }
    if rng.random() < 0.5:
        wishes |= {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    return wishes


def _choices(context: Context) -> Tally:
    """Several choices of one request, forks of the first, against requests of their own."""
    tally = Tally()
    core = context.engine()
    prompts = context.engine_prompts()[:NUM_FORKED]
    for number, prompt in enumerate(prompts):
        requests = [
            context.request(
                f"{number}#{choice}",
                prompt,
                temperature=1.0,
                seed=number,
                choice=choice,
                fork_of=f"{number}#0" if choice else None,
            )
            for choice in range(NUM_CHOICES)
        ]
        expected = {}
        for one in requests:
            alone = context.request(
                "alone", prompt, temperature=1.0, seed=number, choice=one.choice
            )
            expected[one.request_id] = replace(drive(core, [alone])["alone"], name=one.request_id)

        def run(
            replayed: Recording | None, requests: list[EngineRequest] = requests
        ) -> Mapping[str, Trace]:
            arm = Arm({"enable_prefix_caching": True})
            return context.run(arm, requests, Staging(replayed=replayed))

        check_arm(tally, expected, run)
        outputs = {trace.output for trace in expected.values()}
        is_drawn = len(outputs) == NUM_CHOICES or context.settings.max_tokens < 2 * NUM_CHOICES
        tally.require(
            is_drawn, f"the {NUM_CHOICES} choices of prompt {number} are not all different"
        )
        context.step(number, len(prompts))
    return tally


LAWS = (
    Law("sampling", "sampled tokens do not depend on the company or the chunks", _sampling),
    Law("choices", "choices of one request = requests of their own", _choices),
)
