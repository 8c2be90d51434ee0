"""Sampled tokens are a function of prompt, parameters, seed and choice: not of the company.

Each prompt gets its own temperature, filters, penalties and seed. Its run alone is the reference;
then eight run together, whole, in chunks, and in a cache that is too small. A choice of n is
compared with the same choice of a request of its own. Keys and experts are those of the reference,
replayed: they have laws of their own.
A draw jumps where two tokens are about equally likely, and has no margin that a gap of logits could
tell. So every token is drawn again by a sampler that sees nothing but this request and the logits
of its own row: it has to be the same token, without exception. A token that differs from the
reference, though each is what its row of logits gives and the rows agree, was drawn at an edge.
Where arithmetic rounds, rows do not agree and edges are many: then this is all that is asked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampler import Sampler, SampleRow
from gnomon.verify.context import Arm, Context
from gnomon.verify.law import Law, describe
from gnomon.verify.laws.memory import just_enough
from gnomon.verify.margins import AMONG_OURS, Comparison, Kind, compare
from gnomon.verify.result import Tally
from gnomon.verify.trace import Replay, Staging, Trace, cache_of, drive, recording_of

NUM_CHOICES = 3
NUM_FORKED = 4  # prompts whose choices are compared
GROUP = 8
SAME = Comparison(0.0, 0, ())
MAX_EDGE_SHARE = 0.05  # of requests; two scores of a race, or a filter's edge, within rounding
# A reference that was drawn at an edge shows in every run that is compared with it: once counted.


@dataclass(slots=True)
class _Draws:
    """Compares drawn tokens; counts draws at an edge. `device`: where they are drawn."""

    tally: Tally
    device: str
    requests: set[str] = field(default_factory=set)
    edges: set[str] = field(default_factory=set)  # requests

    def check(
        self,
        context: Context,
        arm: Arm,
        requests: Sequence[EngineRequest],
        expected: Mapping[str, Trace],
    ) -> None:
        """Run the requests together; each is a case."""
        known = {one.request_id: expected[one.request_id] for one in requests}
        found = context.run(
            arm, requests, Staging(replay=Replay(recording_of(known), cache_of(known)))
        )
        for request in requests:
            self._judge(request, known[request.request_id], found[request.request_id])

    def _judge(self, request: EngineRequest, expected: Trace, found: Trace) -> None:
        is_rough = expected.roughness is not None  # then only its own logits say what it draws
        compared = compare(expected, found, AMONG_OURS) if not is_rough else SAME
        faults = [one for one in compared.faults if one.kind is not Kind.TOKEN]
        where = f"request {request.request_id}, {describe(found)}"
        again = redraw(request, found, self.device)
        failure = None
        if again != found.output:
            place = next(i for i, token in enumerate(found.output) if again[i] != token)
            failure = (
                f"{where}: tokens differ: number {place} is {found.output[place]}; a sampler that "
                f"sees nothing else draws {again[place]} from the same logits"
            )
        elif faults:
            failure = f"{where}: {faults[0]}"
        self.requests.add(request.request_id)
        if len(compared.faults) > len(faults):
            self.edges.add(request.request_id)
        self.tally.add(compared.worst, failure=failure)

    def finish(self) -> Tally:
        """The tally, with what is to be said about edges."""
        num_edges, num_requests = len(self.edges), len(self.requests)
        self.tally.count("requests drawn at an edge", num_edges)
        is_rare = num_edges <= max(1, MAX_EDGE_SHARE * num_requests)
        self.tally.require(is_rare, f"{num_edges} of {num_requests} requests differ")
        return self.tally


def redraw(request: EngineRequest, trace: Trace, device: str) -> tuple[int, ...]:
    """The tokens that a sampler of its own draws from the logits of a trace, one by one."""
    sampler = Sampler(0)
    drawn = []
    logits = trace.logits.to(device)
    for row in range(trace.num_prompt - 1, len(logits)):
        sampled = sampler.sample(logits[row : row + 1], [SampleRow(request, row + 1)])
        drawn.append(sampled.token_ids[0])
    return tuple(drawn)


def _sampling(context: Context) -> Tally:
    draws = _Draws(context.tally(), context.device)
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
            draws.check(context, Arm(flags), group, expected)
        context.step(first, len(requests))
    return draws.finish()


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
    draws = _Draws(context.tally(), context.device)
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
        draws.check(context, Arm({"enable_prefix_caching": True}), requests, expected)
        outputs = {trace.output for trace in expected.values()}
        is_drawn = len(outputs) == NUM_CHOICES or context.sizes.max_tokens < 2 * NUM_CHOICES
        draws.tally.require(
            is_drawn, f"the {NUM_CHOICES} choices of prompt {number} are not all different"
        )
        context.step(number, len(prompts))
    return draws.finish()


LAWS = (
    Law("sampling", "sampled tokens do not depend on the company or the chunks", _sampling),
    Law("choices", "choices of one request = requests of their own", _choices),
)
