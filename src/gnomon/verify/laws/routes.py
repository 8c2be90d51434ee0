"""DENSE route = SPARSE route (un-absorbed MLA = absorbed), K >= length: sparse = dense.

Every prompt is run with the dense route switched off and with the dense route wherever it is
allowed; in chunks of half of K, so that dense rows with cached context and sparse rows of the same
request occur. With K raised to the longest length the dense route is allowed for every row: then
sparse attention over all keys must give the same. And K must matter: with the model's own K, rows
that see more than K keys have to come out otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gnomon.attention.taps import Recording
from gnomon.verify.context import MATES, Arm, Context
from gnomon.verify.law import ROUGH_UNIT, Law, Run, check_arm, describe
from gnomon.verify.margins import AMONG_OURS, compare
from gnomon.verify.prompts import Prompt, draw_prompts
from gnomon.verify.result import NotRunError, Tally
from gnomon.verify.rough_comparison import compare_rough
from gnomon.verify.trace import Replay, Staging, Trace, cache_of, recording_of

CHANGE = 1e-2  # at logits of standard deviation 1, far above rounding


def _run(context: Context, arm: Arm, prompts: Sequence[Prompt], num_new: int) -> Run:
    """All prompts through one engine, as many at once as it takes."""
    requests = [
        context.request(str(number), prompt, max_tokens=num_new)
        for number, prompt in enumerate(prompts)
    ]

    def run(replay: Replay) -> dict[str, Trace]:
        found: dict[str, Trace] = {}
        for first in range(0, len(requests), MATES):
            found |= context.run(arm, requests[first : first + MATES], Staging(replay=replay))
            context.step(first, len(requests))
        return found

    return run


def _routes(context: Context) -> Tally:
    """The model's own K; prompts around it."""
    tally = context.tally()
    chunk = max(1, context.config.index_topk // 2)
    prompts = _prompts(context)
    num_new = context.sizes.max_tokens
    flags = {"max_prefill_chunk": chunk}
    arms = [Arm({**flags, "dense_route": way}) for way in ("never", "always_when_allowed")]
    sparse, dense = (_run(context, arm, prompts, num_new) for arm in arms)
    expected = sparse(Replay())
    found = check_arm(tally, expected, dense)
    num_dense = sum(trace.num_dense_rows for trace in found.values())
    strays = sum(trace.num_dense_rows for trace in expected.values())
    tally.count("rows went dense", num_dense)
    tally.require(num_dense > 0, "no row took the dense route")
    tally.require(strays == 0, f"{strays} rows went dense where the route was switched off")
    return tally


def _prompts(context: Context) -> list[Prompt]:
    count, seed = context.sizes.engine_prompts, context.settings.seed
    return draw_prompts(context.rule, count, seed, "routes")


def _full_width(context: Context, way: str) -> Arm:
    """K as large as the longest prompt."""
    flags = {"hf_overrides": {"index_topk": context.longest + 1}, "dense_route": way}
    return Arm({**flags, "max_num_batched_tokens": max(MATES, 4 * context.longest)})


def _full(context: Context) -> Tally:
    """Sparse over all keys = dense, over prompts alone."""
    tally = context.tally()
    prompts = _prompts(context)
    expected = _run(context, _full_width(context, "always_when_allowed"), prompts, 1)(Replay())
    check_arm(tally, expected, _run(context, _full_width(context, "never"), prompts, 1))
    num_dense = sum(trace.num_dense_rows for trace in expected.values())
    tally.require(num_dense > 0, "no row took the dense route")
    return tally


def _own_width(context: Context) -> Tally:
    """The model's own K against K = all: equal up to K keys, other beyond."""
    tally = context.tally()
    topk = context.config.index_topk
    prompts = [prompt for prompt in _prompts(context) if len(prompt) > topk]
    if not prompts:
        raise NotRunError(f"no prompt is longer than index_topk = {topk}: raise --max-length")
    expected = _run(context, _full_width(context, "never"), prompts, 1)(Replay())
    cache = {
        name: {part: kept.until(topk) for part, kept in parts.items()}
        for name, parts in cache_of(expected).items()
    }  # later rows attend other keys, and rightly write other values
    roughness = context.roughness()
    replay = Replay(cache=cache)
    if roughness is not None:  # key lists are what differs; experts are not
        chosen = {key: ids[:topk] for key, ids in recording_of(expected).experts.items()}
        replay = Replay(Recording(experts=chosen), cache, {})
        tally.unit = ROUGH_UNIT
    found = _run(context, Arm(), prompts, 1)(replay)
    for name, trace in expected.items():
        short, long = (_rows(one, slice(None, topk)) for one in (trace, found[name]))
        if roughness is None:
            compared = compare(short, long, AMONG_OURS)
        else:
            compared = compare_rough(short, long, roughness)
        beyond = (trace.logits[topk:] - found[name].logits[topk:]).abs().amax(-1)
        change = float(beyond.max()) / max(1.0, float(trace.logits.std()))
        failure = None
        if compared.faults:
            failure = f"{describe(trace)}, rows of at most K keys: {compared.faults[0]}"
        elif len(beyond) > topk and change < CHANGE:
            failure = f"{describe(trace)}: rows of more than K keys moved by {change:.3g} only"
        tally.add(compared.worst, is_tie=compared.is_tie, failure=failure)
    return tally


def _rows(trace: Trace, rows: slice) -> Trace:
    """Some leading rows of a trace: logits alone."""
    logits = trace.logits[rows]
    is_computed = torch.ones(len(logits), dtype=torch.bool)
    return Trace(trace.name, trace.num_prompt, trace.tokens[: len(logits)], logits, is_computed)


LAWS = (
    Law("routes", "dense route = sparse route: un-absorbed = absorbed MLA", _routes),
    Law("full_width", "K >= length: sparse attention = dense attention", _full),
    Law("own_width", "a smaller K changes rows of more than K keys, and no other row", _own_width),
)
