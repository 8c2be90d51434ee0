"""Logits to tokens: one sampled token per row, each row by its own request's parameters.

In:  float32 logits [M, V] and, per row, the request and the position of the token to sample.
Out: SampledRows: token ids, log-probabilities where asked for, and for each row whose logits
     hold NaN or have no finite maximum the reason; its request fails alone.
Greedy rows take the argmax, ties to the lower id, and nothing else is computed for them.
Two halves: `launch` queues the work on the device and waits for nothing, as long as every row is
greedy; `PendingSample.finish` takes what has come to the host. `sample` is one after the other.
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
from gnomon.engine.sampling_draw import Filters, draw
from gnomon.engine.sampling_logprobs import token_logprobs
from gnomon.engine.sampling_noise import uniforms
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
    greatest: Tensor  # [M] maximum of the edited logits
    scored: Tensor  # raw logits [m, V] of the rows that ask for log-probabilities, a copy
    states: tuple[SamplingState, ...]

    def finish(self, token_ids: NDArray[np.int64], greatest: NDArray[np.float64]) -> SampledRows:
        """What the host learns of it, and the counts of the tokens; both arrays [M]."""
        errors = tuple(
            None
            if np.isfinite(value)
            else f"the logits of this row have the maximum {value}: no token is likeliest"
            for value in greatest.tolist()
        )
        chosen = token_ids.tolist()
        for state, token_id, error in zip(self.states, chosen, errors, strict=True):
            if state.counts is not None and error is None:
                state.counts.add(token_id)
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
        states = tuple(self._state(row.request) for row in rows)
        positions = [row.position for row in rows]
        if not rows:
            nothing = logits.new_empty(0)
            return PendingSample(nothing.long(), nothing, logits, states)
        asked = _asked(states)
        scored = logits[:0]
        if asked:  # the logits' memory may be another step's by the time of finish()
            scored = logits.index_select(0, upload([np.array(asked)], logits.device)[0])
        edits = [
            EditRow(index, position, state)
            for index, (state, position) in enumerate(zip(states, positions, strict=True))
            if state.has_edits(position)
        ]
        edited = logits
        if edits:
            edited = logits.clone()
            edit_logits(edited, edits)
        greatest = edited.amax(dim=-1)  # NaN anywhere in a row makes its maximum NaN
        chosen = edited.argmax(dim=-1)
        random_rows = [index for index, state in enumerate(states) if not state.is_greedy]
        if random_rows:
            is_all = len(random_rows) == len(rows)
            (index,) = upload([np.array(random_rows)], logits.device)
            settings = [(states[row], positions[row]) for row in random_rows]
            picked = edited if is_all else edited[index]
            chosen[index] = draw(picked, _filters(settings, picked))
        return PendingSample(chosen, greatest, scored, states)


def _filters(settings: Sequence[tuple[SamplingState, int]], logits: Tensor) -> Filters:
    """Filters and noise of the rows that are drawn, as tensors beside `logits`."""
    num_tokens, device = logits.shape[-1], logits.device
    params = [state.params for state, _ in settings]
    noise = uniforms(
        [state.seed for state, _ in settings],
        [position for _, position in settings],
        [state.choice for state, _ in settings],
    )
    floats = np.array([(p.temperature, p.top_p, p.min_p) for p in params]).T.copy()
    top_k = np.array([p.top_k if 0 < p.top_k < num_tokens else num_tokens for p in params])
    placed, top_k_there, uniform = upload([floats, top_k, noise], device)
    temperature, top_p, min_p = placed.unbind(0)
    return Filters(temperature, top_k_there, top_p, min_p, uniform)


def _asked(states: Sequence[SamplingState]) -> list[int]:
    """Rows whose requests ask for log-probabilities."""
    return [row for row, state in enumerate(states) if state.params.logprobs is not None]


def _logprobs(
    scored: Tensor,
    chosen: Tensor,
    states: Sequence[SamplingState],
    errors: Sequence[str | None],
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities under the raw logits `scored` of the rows that ask for them."""
    found: list[TokenLogprobs | None] = [None] * len(states)
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
