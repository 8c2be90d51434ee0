"""Logits to tokens: one sampled token per row, each row by its own request's parameters.

In:  float32 logits [M, V] and, per row, the request and the position of the token to sample.
Out: SampledRows: token ids, log-probabilities where asked for, and for each row whose logits
     hold NaN or have no finite maximum the reason; its request fails alone.
Greedy rows take the argmax, ties to the lower id, and nothing else is computed for them.
The sampler owns the SamplingState of every live request: made at its first sample, gone with
`drop` when the request is finished; preemption in between changes nothing.
Not here: whether the token ends the request (scheduler), speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        if not rows:
            return SampledRows((), (), ())
        states = [self._state(row.request) for row in rows]
        positions = [row.position for row in rows]
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
        is_sound = torch.isfinite(greatest)
        chosen = edited.argmax(dim=-1)
        errors = _errors(is_sound, greatest)
        random_rows = [
            index
            for index, state in enumerate(states)
            if not state.is_greedy and errors[index] is None
        ]
        if random_rows:
            index = torch.tensor(random_rows, device=logits.device)
            picked = edited if len(random_rows) == len(rows) else edited[index]
            settings = [(states[row], positions[row]) for row in random_rows]
            chosen[index] = draw(picked, _filters(settings, picked))
        token_ids = chosen.tolist()
        for state, token_id, error in zip(states, token_ids, errors, strict=True):
            if state.counts is not None and error is None:
                state.counts.add(token_id)
        return SampledRows(tuple(token_ids), _logprobs(logits, chosen, states, errors), errors)


def _errors(is_sound: Tensor, greatest: Tensor) -> tuple[str | None, ...]:
    """Per row None, or why nothing can be sampled from it."""
    if bool(is_sound.all()):
        return (None,) * len(is_sound)
    return tuple(
        None if sound else f"the logits of this row have the maximum {value}: no token is likeliest"
        for sound, value in zip(is_sound.tolist(), greatest.tolist(), strict=True)
    )


def _filters(settings: Sequence[tuple[SamplingState, int]], logits: Tensor) -> Filters:
    """Filters and noise of the rows that are drawn, as tensors beside `logits`."""
    num_tokens, device = logits.shape[-1], logits.device
    params = [state.params for state, _ in settings]
    noise = uniforms(
        [state.seed for state, _ in settings],
        [position for _, position in settings],
        [state.choice for state, _ in settings],
    )
    floats = torch.tensor([(p.temperature, p.top_p, p.min_p) for p in params], dtype=torch.float64)
    temperature, top_p, min_p = floats.to(device).unbind(-1)
    top_k = torch.tensor([p.top_k if 0 < p.top_k < num_tokens else num_tokens for p in params])
    return Filters(temperature, top_k.to(device), top_p, min_p, torch.from_numpy(noise).to(device))


def _logprobs(
    logits: Tensor,
    chosen: Tensor,
    states: Sequence[SamplingState],
    errors: Sequence[str | None],
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities under the raw logits, for the rows that ask for them."""
    asked = [
        row
        for row, (state, error) in enumerate(zip(states, errors, strict=True))
        if state.params.logprobs is not None and error is None
    ]
    found: list[TokenLogprobs | None] = [None] * len(states)
    if asked:
        index = torch.tensor(asked, device=logits.device)
        counts = [states[row].params.logprobs or 0 for row in asked]
        values = token_logprobs(logits[index], chosen[index], counts)
        for row, value in zip(asked, values, strict=True):
            found[row] = value
    return tuple(found)
