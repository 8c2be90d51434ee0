"""What the cache forgets, shares and takes away changes no token: prefixes, preemption, priority.

Prefixes: for every residue r modulo a page (of a page of more than 16 for 16 of them, others in
each round), two prompts share some whole pages and r tokens more;
the second one finds the whole pages in the cache and has to come out as if it had found nothing.
Preemption: a cache of only just enough pages for the longest request, or for all prompts but not
for the answers, and many requests at once; some are pushed out and computed again.
Priority: important requests come late and push out others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gnomon.attention.taps import Recording
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import EngineRequest
from gnomon.verify.context import Arm, Context
from gnomon.verify.law import Law, check_arm
from gnomon.verify.prompts import Prompt, draw_prompt
from gnomon.verify.result import NotRunError, Tally
from gnomon.verify.trace import Replay, Staging, Trace, drive, recording_of

CROWD = 8  # requests in a cache that is too small for them
MAX_PAGES_SHARED = 3
MOST_RESIDUES = 16
MAX_TAIL = 40  # tokens behind a shared prefix
LATE = 6  # steps after which important requests begin to come


def _prefixes(context: Context) -> Tally:
    """One case per residue: the second of two prompts that share a prefix."""
    page, longest = context.block_size, context.longest
    if longest < 2 * page:
        raise NotRunError(f"prompts of {longest} tokens hold less than two pages of {page}")
    rng = random.Random(f"{context.settings.seed}:prefixes")
    tally = context.tally()
    firsts: list[EngineRequest] = []
    seconds: list[EngineRequest] = []
    prompts: list[Prompt] = []
    shared: list[int] = []
    for residue in _residues(page, rng):
        pages = rng.randint(1, max(1, min(MAX_PAGES_SHARED, longest // page - 1)))
        prefix = draw_prompt(context.rule, pages * page + residue, rng)
        own, other = (_with_tail(context, prefix, first, rng) for first in (0, 1))
        firsts.append(context.request(f"first {residue}", own, cache_salt=str(residue)))
        name = f"shares {pages} pages and {residue} tokens"
        seconds.append(context.request(name, other, cache_salt=str(residue)))
        prompts.append(other)
        shared.append(pages * page)
    names = [request.request_id for request in seconds]

    expected = dict(zip(names, context.reference(prompts), strict=True))
    of_firsts = {
        first.request_id: {part: kept.until(length) for part, kept in expected[name].cached.items()}
        for first, name, length in zip(firsts, names, shared, strict=True)
    }  # what both have in common is written by the first

    chosen = None
    if context.roughness() is not None:
        chosen = _prefix_choices(expected, dict(zip(names, firsts, strict=True)), shared)

    def run(replay: Replay) -> Mapping[str, Trace]:
        core = context.engine(Arm({"enable_prefix_caching": True}))
        known = Replay(cache=of_firsts)
        if chosen is not None:
            known = Replay(chosen, of_firsts, {})
        drive(core, firsts, Staging(replay=known))
        return drive(core, seconds, Staging(replay=replay))

    found = check_arm(tally, expected, run)
    for name, num_shared in zip(names, shared, strict=True):
        cached = found[name].num_cached
        tally.require(
            cached == num_shared, f"{name}: {cached} tokens came from the cache, not {num_shared}"
        )
    return tally


def _residues(page: int, rng: random.Random) -> list[int]:
    """All of them; of a large page its edges and a few between, others in each round."""
    if page <= MOST_RESIDUES:
        return list(range(page))
    edges = [0, 1, page // 2, page - 1]
    between = sorted(set(range(page)) - set(edges))
    return sorted(edges + rng.sample(between, MOST_RESIDUES - len(edges)))


def _prefix_choices(
    expected: Mapping[str, Trace], firsts: Mapping[str, EngineRequest], shared: Sequence[int]
) -> Recording:
    """What the second requests chose over the pages that they share, for the first ones to do."""
    given, found = recording_of(expected), Recording()
    for (name, first), length in zip(firsts.items(), shared, strict=True):
        for kept, source in ((found.index, given.index), (found.experts, given.experts)):
            own = {layer: ids for (layer, owner), ids in source.items() if owner == name}
            kept.update({(layer, first.request_id): ids[:length] for layer, ids in own.items()})
    return found


def _with_tail(context: Context, prefix: Prompt, first: int, rng: random.Random) -> Prompt:
    """The prefix, the token that tells two prompts apart, and some more."""
    room = max(0, min(MAX_TAIL, context.longest - len(prefix) - 1))
    return (*prefix, first, *draw_prompt(context.rule, rng.randint(0, room), rng))


def _preemption(context: Context) -> Tally:
    """Crowds in a small cache, with and without the prefix cache."""
    tally = context.tally()
    for has_prefix_cache in (False, True):
        _crowds(context, tally, {"enable_prefix_caching": has_prefix_cache}, {}, {})
    return tally


def _priority(context: Context) -> Tally:
    """The same with important requests that come late."""
    tally = context.tally()
    late = {str(number): LATE + 2 * number for number in range(CROWD // 2, CROWD)}
    importance = {str(number): CROWD - number for number in range(CROWD)}
    _crowds(context, tally, {"scheduling_policy": "priority"}, late, importance)
    return tally


def _crowds(
    context: Context,
    tally: Tally,
    flags: Mapping[str, object],
    arrivals: Mapping[str, int],
    priority: Mapping[str, int],
) -> None:
    prompts = context.engine_prompts()
    num_preemptions = 0
    for first in range(0, len(prompts), CROWD):
        crowd = prompts[first : first + CROWD]
        names = [str(number) for number in range(len(crowd))]
        requests = [
            context.request(name, prompt, priority=priority.get(name, 0))
            for name, prompt in zip(names, crowd, strict=True)
        ]
        expected = dict(zip(names, context.reference(crowd), strict=True))
        for pages in (just_enough(context, crowd), snug(context, crowd)):
            counts: list[int] = []
            run = partial(
                _run_crowd,
                core=partial(context.engine, Arm({**flags, **pages})),
                requests=requests,
                arrivals=arrivals,
                preemptions=counts,
            )
            check_arm(tally, expected, run)
            num_preemptions += counts[0]
        context.step(first, len(prompts))
    tally.count("preemptions", num_preemptions)
    tally.require(num_preemptions > 0, "nobody was preempted, so nothing was put to the test")


def _run_crowd(
    replay: Replay,
    core: Callable[[], EngineCore],
    requests: Sequence[EngineRequest],
    arrivals: Mapping[str, int],
    preemptions: list[int],
) -> Mapping[str, Trace]:
    """One run in a fresh engine; appends how often somebody was pushed out."""
    engine = core()
    found = drive(engine, requests, Staging(arrivals, replay))
    preemptions.append(engine.stats().num_preemptions)
    return found


def just_enough(context: Context, crowd: Sequence[Prompt]) -> dict[str, int]:
    """Pages for the longest request of the crowd, and the null page."""
    longest = max(len(prompt) for prompt in crowd) + context.sizes.max_tokens
    pages = -(-longest // context.block_size) + 1
    return {"num_kv_pages": pages, "max_model_len": longest}


def snug(context: Context, crowd: Sequence[Prompt]) -> dict[str, int]:
    """Pages for all prompts of the crowd, so that all can start, but hardly for what follows."""
    least = just_enough(context, crowd)
    size = context.block_size
    pages = 2 + sum(-(-len(prompt) // size) for prompt in crowd)
    return {**least, "num_kv_pages": max(pages, least["num_kv_pages"])}


LAWS = (
    Law("prefixes", "a prefix from the cache = computed, for every residue of a page", _prefixes),
    Law("preemption", "preempted and resumed = uninterrupted, with just enough pages", _preemption),
    Law("priority", "pushed out by important requests = uninterrupted", _priority),
)
