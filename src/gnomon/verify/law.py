"""Law: an equality that must hold, and how to put it to the test.

In:  a Context.
Out: a Tally of its cases; run.py makes the LawResult of it.
`check_arm` is what most laws of the engine are: run the same prompts another way, compare each with
its reference, and repeat the run with the choices replayed if something was a tie. In arithmetic
that rounds (Trace.roughness) they are replayed at once, tokens too (rough_comparison.py).
Not here: single laws (laws/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gnomon.verify.context import Context
from gnomon.verify.margins import AMONG_OURS, Comparison, Tolerances, compare
from gnomon.verify.result import Tally
from gnomon.verify.rough_comparison import compare_rough
from gnomon.verify.trace import Replay, Trace, cache_of, recording_of

ROUGH_UNIT = "rms"  # of a row's logits
Run = Callable[[Replay], Mapping[str, Trace]]


@dataclass(frozen=True, slots=True)
class Law:
    """`test` may raise NotRunError where the law cannot be put to the test."""

    name: str
    sentence: str
    test: Callable[[Context], Tally]


def check_arm(
    tally: Tally,
    expected: Mapping[str, Trace],
    run: Run,
    tolerances: Tolerances = AMONG_OURS,
) -> dict[str, Trace]:
    """Compare a run with `expected`, request by request; every request is a case.

    `run(replay)` makes it; where the cache rounds, with the values that `expected` wrote, and in
    a second run with the choices replayed. Returns the traces of the first run.
    """
    if any(trace.roughness is not None for trace in expected.values()):
        return _check_rough(tally, expected, run)
    cache = cache_of(expected)
    found = dict(run(Replay(cache=cache)))
    compared = {name: compare(trace, found[name], tolerances) for name, trace in expected.items()}
    replayed: Mapping[str, Trace] = {}
    if any(one.is_tie for one in compared.values()):
        replayed = run(Replay(recording_of(expected), cache))
    for name, one in compared.items():
        tally.add_choices(one.num_choices, one.num_choice_ties)
        if one.is_tie:
            again = compare(expected[name], replayed[name], tolerances)
            failure = _failure(expected[name], again, name, True)
            tally.add(again.worst, is_tie=one.is_token_tie, failure=failure)
        else:
            tally.add(one.worst, failure=_failure(expected[name], one, name, False))
    return found


def replay_of(expected: Mapping[str, Trace]) -> Replay:
    """All of it: choices, cached values, tokens."""
    tokens = {name: trace.tokens for name, trace in expected.items()}
    return Replay(recording_of(expected), cache_of(expected), tokens)


def check_rough(tally: Tally, expected: Trace, found: Trace) -> None:
    """Compare a run with all that `expected` showed replayed; it is a case."""
    assert expected.roughness is not None
    compared = compare_rough(expected, found, expected.roughness)
    tally.unit = ROUGH_UNIT
    tally.add_choices(compared.num_choices, 0)
    tally.add(compared.worst, failure=_failure(expected, compared, expected.name, False))


def _check_rough(tally: Tally, expected: Mapping[str, Trace], run: Run) -> dict[str, Trace]:
    found = dict(run(replay_of(expected)))
    for name, trace in expected.items():
        check_rough(tally, replace(trace, name=name), found[name])
    return found


def _failure(expected: Trace, compared: Comparison, name: str, is_replay: bool) -> str | None:
    if not compared.faults:
        return None
    how = " (a tie, replayed, still differs)" if is_replay else ""
    return f"request {name}, {describe(expected)}{how}: {compared.faults[0]}"


def describe(trace: Trace) -> str:
    """A prompt in few words: its length, and its first ids."""
    first = ", ".join(str(token) for token in trace.tokens[: min(6, trace.num_prompt)])
    more = ", ..." if trace.num_prompt > 6 else ""
    return f"prompt of {trace.num_prompt} tokens [{first}{more}]"
