"""What the sampler remembers of one request, and the edits that it makes to the logits for it.

In:  an EngineRequest when it is added; each sampled token afterwards.
Out: edits of rows of logits, in this order: logit bias; repetition penalty (divides positive and
     multiplies negative logits of every token seen in prompt or output); frequency and presence
     penalties (output tokens only); min_tokens (bans EOS and the stop ids until enough tokens
     are out). Counts grow by one per sampled token: nothing is recounted.
Not here: temperature and filters (sampling_draw.py), greedy choice, log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.attention.upload import upload
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_noise import MASK64, derived_seed

MIN_TEMPERATURE = 1e-5
"""Temperatures below it are greedy: the quotient would overflow before the draw could differ."""


class TokenCounts:
    """Distinct tokens of one request with their number in the output, in order of first sight."""

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        """`prompt_token_ids` are seen, with an output count of 0."""
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._index = {int(token_id): place for place, token_id in enumerate(distinct)}
        capacity = 2 * len(distinct) + 16
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(capacity, dtype=np.float32)

    def add(self, token_id: int) -> None:
        """Count one output token."""
        place = self._index.setdefault(token_id, len(self._index))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1.0

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Distinct token ids, [n]."""
        return self._ids[: len(self._index)]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """How often each of `token_ids` is in the output, [n]."""
        return self._counts[: len(self._index)]


class SamplingState:
    """Settings and counts of one request; owned by the sampler, kept over preemptions."""

    __slots__ = (
        "banned", "bias_ids", "bias_values", "choice", "counts", "has_logprobs", "is_greedy",
        "may_edit", "num_prompt", "params", "seed", "wishes",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, engine_seed: int) -> None:
        params = request.params
        self.params = params
        self.choice = request.choice
        self.num_prompt = len(request.prompt_token_ids)
        self.is_greedy = params.temperature < MIN_TEMPERATURE
        source = request.fork_of or request.request_id
        seed = derived_seed(engine_seed, source) if params.seed is None else params.seed
        self.seed = seed & MASK64
        self.has_logprobs = params.logprobs is not None
        temperature = 0.0 if self.is_greedy else params.temperature
        # top_k at most 2^53 as a float: beyond any vocabulary either way
        self.wishes = (temperature, float(min(params.top_k, 2**53)), params.top_p, params.min_p)
        stops = {*params.stop_token_ids, *request.eos_token_ids} if params.min_tokens else ()
        self.banned = np.array(sorted(stops), dtype=np.int64)
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self.bias_values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1.0:
            self.counts = TokenCounts(request.prompt_token_ids)
        elif params.frequency_penalty or params.presence_penalty:
            self.counts = TokenCounts(())
        self.may_edit = bool(len(self.banned) or len(bias) or self.counts is not None)

    def has_edits(self, position: int) -> bool:
        """Whether the logits of the token at `position` are changed at all."""
        has_bans = len(self.banned) > 0 and self.is_banning(position)
        return has_bans or self.counts is not None or len(self.bias_ids) > 0

    def is_banning(self, position: int) -> bool:
        """Whether the token at `position` comes before min_tokens tokens are out."""
        return position - self.num_prompt < self.params.min_tokens


@dataclass(frozen=True, slots=True)
class EditRow:
    """A row of the logits whose token is to be edited."""

    row: int
    position: int
    state: SamplingState


def edit_logits(logits: Tensor, rows: Sequence[EditRow]) -> None:
    """Apply the edits of all `rows` to logits [M, V] in place, one indexed write per kind."""
    _edit(logits, [(r.row, r.state.bias_ids, r.state.bias_values) for r in rows], _add_bias)
    penalised = [(r, counts) for r in rows if (counts := r.state.counts) is not None]
    repetitions, subtractions = [], []
    for r, counts in penalised:
        params = r.state.params
        if params.repetition_penalty != 1.0:
            factor = np.full(len(counts.token_ids), params.repetition_penalty, np.float32)
            repetitions.append((r.row, counts.token_ids, factor))
        amount = params.frequency_penalty * counts.output_counts
        amount += params.presence_penalty * (counts.output_counts > 0)
        subtractions.append((r.row, counts.token_ids, -amount))
    _edit(logits, repetitions, _repeat_penalty)
    _edit(logits, subtractions, _add_bias)
    bans = [r for r in rows if r.state.is_banning(r.position)]
    infinity = [np.full(len(r.state.banned), -np.inf, np.float32) for r in bans]
    pairs = zip(bans, infinity, strict=True)
    _edit(logits, [(r.row, r.state.banned, value) for r, value in pairs], _add_bias)


def _add_bias(old: Tensor, value: Tensor) -> Tensor:
    return old + value


def _repeat_penalty(old: Tensor, value: Tensor) -> Tensor:
    return torch.where(old > 0, old / value, old * value)


Edit = tuple[int, NDArray[np.int64], NDArray[np.float32]]


def _edit(
    logits: Tensor, edits: Sequence[Edit], change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """logits[row, ids] = change(old, values) for all edits at once; no (row, id) comes twice."""
    num_edits = sum(len(ids) for _, ids, _ in edits)
    if num_edits == 0:
        return
    device, num_tokens = logits.device, logits.shape[-1]
    places = np.concatenate([ids + row * num_tokens for row, ids, _ in edits])
    index, values = upload([places, np.concatenate([values for _, _, values in edits])], device)
    flat = logits.view(-1)
    flat[index] = change(flat[index], values)
