"""Logits to tokens: one sampled token per row, each row by its own request's parameters.

In:  float32 logits [M, V] and, per row, the request and the position of the token to sample.
Out: SampledRows: token ids, log-probabilities where asked for, and for each row whose logits
     hold NaN or have no finite maximum the reason; its request fails alone.
How a token is chosen: sampling_draw.py.
Two halves: `launch` queues the work on the device and waits for nothing; `PendingSample.finish`
takes what has come to the host. `sample` is one after the other.
The sampler owns the SamplingState of every live request: made at its first sample, gone with
`drop` when the request is finished; preemption in between changes nothing.
Not here: whether the token ends the request (scheduler), speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gnomon.attention.upload import upload
from gnomon.engine.landing import Landing
from gnomon.engine.messages import EngineRequest, TokenLogprobs
from gnomon.engine.sampling_draw import Wishes, choose
from gnomon.engine.sampling_logprobs import token_logprobs
from gnomon.engine.sampling_state import EditRow, SamplingState, edit_logits


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of the logits: whose token it is, and at which position (0-based) it will stand."""

    request: EngineRequest
    position: int


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What was sampled; all tuples have one entry per row, in the order of the rows given."""

    token_ids: tuple[int, ...]  # meaningless where there is an error
    logprobs: tuple[TokenLogprobs | None, ...]
    errors: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PendingSample:
    """Tokens that are, or are being, sampled on the device. `finish` it once, in order of steps."""

    token_ids: Tensor  # [M] int64
    greatest: Tensor  # [M] float64: maximum of the edited logits
    scored: Tensor  # raw logits [m, V] of the rows that ask for log-probabilities, a copy
    states: tuple[SamplingState, ...]

    def finish(self, token_ids: NDArray[np.int64], greatest: NDArray[np.float64]) -> SampledRows:
        """What the host learns of it, and the counts of the tokens; both arrays [M]."""
        chosen, errors = token_ids.tolist(), _errors(greatest)
        for row, state in enumerate(self.states):
            if state.counts is not None and errors[row] is None:
                state.counts.add(chosen[row])
        logprobs = _logprobs(self.scored, self.token_ids, self.states, errors)
        return SampledRows(tuple(chosen), logprobs, errors)


class Sampler:
    """The owner of all sampling state (module docstring)."""

    def __init__(self, engine_seed: int) -> None:
        """`engine_seed` is mixed into the seed of requests that bring none."""
        self._engine_seed = engine_seed
        self._states: dict[str, SamplingState] = {}

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended, whether it was ever sampled or not."""
        self._states.pop(request_id, None)

    def _state(self, request: EngineRequest) -> SamplingState:
        state = self._states.get(request.request_id)
        if state is None:
            state = SamplingState(request, self._engine_seed)
            self._states[request.request_id] = state
        return state

    def __len__(self) -> int:
        """Requests remembered."""
        return len(self._states)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> SampledRows:
        """Sample one token per row of logits [M, V]; counts are updated, `logits` is not."""
        pending = self.launch(logits, rows)
        token_ids, greatest = Landing((pending.token_ids, pending.greatest)).wait()
        return pending.finish(token_ids, greatest)

    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> PendingSample:
        """Queue the sampling of one token per row of logits [M, V], which is not changed."""
        states = tuple([self._state(row.request) for row in rows])
        asked = _asked(states)
        scored = logits[:0]
        if asked:  # the logits' memory may be another step's by the time of finish()
            scored = logits.index_select(0, upload([np.array(asked)], logits.device)[0])
        edits = [
            EditRow(index, rows[index].position, state)
            for index, state in enumerate(states)
            if state.may_edit and state.has_edits(rows[index].position)
        ]
        edited = logits
        if edits:
            edited = logits.clone()
            edit_logits(edited, edits)
        chosen = choose(edited, _wishes(states, [row.position for row in rows]))
        return PendingSample(chosen.token_ids, chosen.greatest, scored, states)


def _wishes(states: Sequence[SamplingState], positions: Sequence[int]) -> Wishes | None:
    """What the rows wish, None if all are greedy."""
    if all([state.is_greedy for state in states]):
        return None
    table = np.array([state.wishes for state in states]).T
    temperature, top_k, top_p, min_p = table.copy()
    return Wishes(
        temperature=temperature,
        seed=np.array([state.seed for state in states], dtype=np.uint64),
        position=np.array(positions, dtype=np.int64),
        choice=np.array([state.choice for state in states], dtype=np.int64),
        top_k=top_k.astype(np.int64),
        top_p=top_p,
        min_p=min_p,
    )


def _errors(greatest: NDArray[np.float64]) -> tuple[str | None, ...]:
    """Why rows of these maxima must fail."""
    is_finite = np.isfinite(greatest)
    if is_finite.all():
        return (None,) * len(greatest)
    return tuple(
        None
        if is_good
        else f"the logits of this row have the maximum {value}: no token is likeliest"
        for value, is_good in zip(greatest.tolist(), is_finite.tolist(), strict=True)
    )


def _asked(states: Sequence[SamplingState]) -> list[int]:
    """Rows whose requests ask for log-probabilities."""
    return [row for row, state in enumerate(states) if state.has_logprobs]


def _logprobs(
    scored: Tensor,
    chosen: Tensor,
    states: Sequence[SamplingState],
    errors: Sequence[str | None],
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities under the raw logits `scored` of the rows that ask for them."""
    found: list[TokenLogprobs | None] = [None] * len(states)
    if not scored.shape[0]:
        return tuple(found)
    asked = [(place, row) for place, row in enumerate(_asked(states)) if errors[row] is None]
    if asked:
        places, rows = upload(
            [np.array(column) for column in zip(*asked, strict=True)], chosen.device
        )
        counts = [states[row].params.logprobs or 0 for _, row in asked]
        values = token_logprobs(scored[places], chosen[rows], counts)
        for (_, row), value in zip(asked, values, strict=True):
            found[row] = value
    return tuple(found)
