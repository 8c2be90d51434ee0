"""Batch to logits: one forward pass over the cache, and the logits of the rows that need them.

In:  a Batch or a DecodeBatch (batch.py).
Out: RunOutput: float32 logits [M, V] on the device, of the rows that sample, and a verdict on the
     requests (step_checks.py). Nothing waits for the device, unless somebody listens or checks.
A DecodeBatch is replayed by its captured graph where there are graphs, and a prefill or mixed step
that fits a bucket runs in graphs between its attentions. With listeners, with other operators than
usual, and where checked mode looks at the step, all run eagerly.
The head runs on rows padded to a multiple of `row_multiple`, for the same reason as the batch.
Listeners: a SelectionTap sees the discrete choices of the layers, a LogitsTap the logits.
Not here: sampling (sampler.py), capturing (graphs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.checked import StepChecker
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import StepPlan
from gnomon.attention.step import AttentionStep
from gnomon.attention.taps import SelectionTap
from gnomon.engine.batch import Batch, DecodeBatch
from gnomon.engine.graphs import DecodeGraphs
from gnomon.engine.messages import TokenLogprobs
from gnomon.engine.operators import operators_for
from gnomon.engine.prefill_graphs import PrefillGraphs
from gnomon.engine.sampling_logprobs import token_logprobs
from gnomon.engine.step_checks import Verdict, broken_rules, row_flags
from gnomon.models.layer_kinds import attending, thinned
from gnomon.models.sparse_mla_model import ForwardOutput, SparseMlaModel

PROMPT_SLICE = 128
"""Rows whose logits exist at once when a prompt is scored: [128, V] and not [prompt, V]."""


class LogitsTap(Protocol):
    """Sees logits as the model made them: of every row, or of the sampled ones only."""

    wants_every_row: bool

    def logits(self, request_ids: Sequence[str], positions: Sequence[int], logits: Tensor) -> None:
        """logits[i] belongs to the row of request_ids[i] at positions[i]; keep a copy, if any."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Who listens to a step."""

    selection: SelectionTap | None = None
    logits: LogitsTap | None = None


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Captured steps; None where those of a kind always run eagerly."""

    decode: DecodeGraphs | None = None
    prefill: PrefillGraphs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RunOutput:
    """What a step computed."""

    logits: Tensor  # [M, V] float32, M = len(batch.samples); a graph's next replay overwrites it
    verdict: Verdict  # request id -> why it must fail: NaN, or a rule that was broken
    prompt_logprobs: Mapping[str, list[TokenLogprobs]]  # of this step's prompt_rows


class Runner:
    """The model with its cache and operators; stateless but for the cache's contents."""

    def __init__(
        self,
        model: SparseMlaModel,
        pools: Mapping[str, PagedPool],
        ops: Operators,
        row_multiple: int = 1,
        checker: StepChecker | None = None,
        graphs: StepGraphs | None = None,
        decode_ops: Operators | None = None,
    ) -> None:
        """``decode_ops``: for steps that decode and run eagerly; None: ``ops``."""
        self._model = model
        graphs = graphs or StepGraphs()
        self._graphs, self._prefill = graphs.decode, graphs.prefill
        self._pools = pools
        self._ops = ops
        self._decode_ops = decode_ops
        self._row_multiple = row_multiple
        self._checker = checker

    @property
    def model(self) -> SparseMlaModel:
        """The model that is run."""
        return self._model

    def operators(self, plan: StepPlan) -> Operators:
        """The operators that an eager step with this plan runs with, checked mode apart."""
        return operators_for(plan, self._ops, self._decode_ops)

    @property
    def most_captured(self) -> int:
        """Rows of the largest prefill step that is captured."""
        return 0 if self._prefill is None else self._prefill.rules.buckets[-1]

    def captures(self, batch: Batch) -> bool:
        """Whether graphs take the step, if nobody listens or checks."""
        return self._prefill is not None and self._prefill.takes(batch)

    def rehearsing(self) -> Runner:
        """One that launches what this one does, over as few layers as that takes.

        It skips what is captured and what checks. What it computes means nothing.
        """
        thin, prefill = thinned(self._model), self._prefill
        prefill = None if prefill is None else prefill.rehearsing(attending(self._model))
        graphs = StepGraphs(None, prefill)
        multiple = self._row_multiple
        return Runner(thin, self._pools, self._ops, multiple, None, graphs, self._decode_ops)

    @torch.inference_mode()
    def run(
        self,
        batch: Batch | DecodeBatch,
        taps: Taps | None = None,
        ops: Operators | None = None,
        is_checked: bool = True,
    ) -> RunOutput:
        """Run one step, with other operators than usual if ``ops`` are given.

        The cache holds the step's tokens afterwards; running a step twice leaves it the same.
        ``is_checked=False``: checked mode, if it is on, does not see this run.
        """
        taps = taps or Taps()
        is_watched = taps != Taps() or ops is not None
        if isinstance(batch, DecodeBatch):
            if self._graphs is not None and not is_watched and self._skips_check():
                logits, flags = self._graphs.replay(batch)
                return RunOutput(logits, _decode_verdict(batch, flags), {})
            batch = batch.eager()
        checker = self._checker if is_checked else None
        ops = ops or self.operators(batch.plan)
        prefill = None if is_watched or not self.captures(batch) else self._prefill
        if prefill is not None and (checker is None or checker.skip_step()):
            output, checker = prefill.forward(batch, ops), None
        else:
            output = self._run_eagerly(batch, taps, ops, checker)
        hidden = output.hidden.data
        logits = self.logits(hidden.index_select(0, batch.logit_rows))
        if taps.logits is not None:
            self._tell(taps.logits, batch, hidden, logits)
        return RunOutput(
            logits=logits,
            verdict=Verdict(
                row_flags(hidden, output.nan_rows.data),
                batch.geometry.rows.host_rows(),
                batch.request_ids,
                broken_rules(checker),
            ),
            prompt_logprobs=self._score_prompts(batch, hidden),
        )

    def _run_eagerly(
        self, batch: Batch, taps: Taps, ops: Operators, checker: StepChecker | None
    ) -> ForwardOutput:
        """The model's own forward pass."""
        if taps.selection is not None:
            taps.selection.begin_step(batch.geometry.rows, batch.request_ids)
        if checker is not None:
            ops = checker.begin_step(batch.geometry, batch.plan, batch.request_ids, ops)
        step = AttentionStep(batch.geometry, batch.plan, self._pools, ops, taps.selection)
        return self._model.forward(batch.token_ids, step)

    @torch.inference_mode()
    def remember(self, token_ids: Tensor) -> None:
        """What is being sampled, int64 [M] on the device: for a captured step that feeds on it."""
        if self._graphs is not None:
            self._graphs.remember(token_ids)

    def _skips_check(self) -> bool:
        """Whether checked mode has nothing to look at in the next step, which then counts."""
        return self._checker is None or self._checker.skip_step()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of hidden [M, D], computed on a padded number of rows."""
        num_rows = hidden.shape[0]
        missing = -num_rows % self._row_multiple
        if missing:
            hidden = torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])])
        return self._model.logits(hidden, self._ops)[:num_rows].float()

    def _tell(self, tap: LogitsTap, batch: Batch, hidden: Tensor, sampled: Tensor) -> None:
        if tap.wants_every_row:
            request, position = batch.geometry.rows.host_rows()
            rows = batch.geometry.rows.host_live_rows()
            names = [batch.request_ids[request[row]] for row in rows]
            every = self.logits(hidden)
            every[batch.logit_rows] = sampled  # to the bit what the sampler saw
            tap.logits(names, position[rows].tolist(), every[torch.from_numpy(rows)])
        else:
            names = [row.request.request_id for row in batch.samples]
            tap.logits(names, [row.position - 1 for row in batch.samples], sampled)

    def _score_prompts(self, batch: Batch, hidden: Tensor) -> dict[str, list[TokenLogprobs]]:
        scored: dict[str, list[TokenLogprobs]] = {}
        for part in batch.prompt_rows:
            num_top = part.request.params.prompt_logprobs or 0
            ids = torch.tensor(part.next_ids, dtype=torch.int64, device=hidden.device)
            found = scored[part.request.request_id] = []
            for start in range(0, len(part.rows), PROMPT_SLICE):
                rows = part.rows[start : start + PROMPT_SLICE]
                logits = self.logits(hidden[rows.start : rows.stop])
                chosen = ids[start : start + len(rows)]
                found += token_logprobs(logits, chosen, [num_top] * len(rows))
        return scored


def _decode_verdict(batch: DecodeBatch, flags: Tensor) -> Verdict:
    num_rows = len(batch.request_ids)
    rows = (np.arange(num_rows), batch.kv_len.astype(np.int64) - 1)
    return Verdict(flags, rows, batch.request_ids)
