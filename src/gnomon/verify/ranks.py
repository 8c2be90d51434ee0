"""An engine whose every step runs on n simulated context-parallel ranks in this process.

In:  a Batch, as the engine builds it for one rank.
Out: RunOutput, as one rank would give it: each rank takes its shard of the rows, has a cache of its
     own, and gathers what it writes from all; the hidden rows are put together again.
Every rank plans its shard for itself, as real ranks do. A listener hears all ranks under one lock;
each rank tells it whose rows come.
Not here: collectives (gnomon.parallel), how rows are dealt (attention/sharding.py), speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.geometry import Geometry, RowTensor
from gnomon.attention.indices import KeySet
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import Selection
from gnomon.attention.plan import plan_step
from gnomon.attention.routes import RoutePolicy
from gnomon.attention.sharding import ShardStrategy, deal_rows, shard_rows
from gnomon.attention.step import AttentionStep
from gnomon.attention.taps import SelectionTap
from gnomon.engine.batch import Batch, DecodeBatch
from gnomon.engine.runner import Runner, RunOutput, Taps
from gnomon.engine.step_checks import Verdict, row_flags
from gnomon.models.sparse_mla_model import ForwardOutput, SparseMlaModel
from gnomon.parallel.simulated import SimulatedRank, run_ranks


@dataclass(frozen=True, slots=True, eq=False)
class RankParts:
    """What a rank has of its own."""

    pools: Mapping[str, PagedPool]
    ops: Operators


class RankTap:
    """One rank's way to a tap that all ranks share."""

    def __init__(
        self, shared: SelectionTap, rows: RowAxis, request_ids: Sequence[str], lock: Lock
    ) -> None:
        self._shared, self._rows, self._names, self._lock = shared, rows, request_ids, lock
        self.wants_margin = shared.wants_margin

    def begin_step(self, rows: RowAxis, request_ids: Sequence[str]) -> None:
        """The rows of this rank."""
        self._rows, self._names = rows, request_ids

    def index(self, layer: int, selection: Selection) -> KeySet:
        """As the shared tap chooses."""
        with self._lock:
            self._shared.begin_step(self._rows, self._names)
            return self._shared.index(layer, selection)

    def experts(self, layer: int, expert_ids: Tensor, margin: Tensor) -> Tensor:
        """As the shared tap chooses."""
        with self._lock:
            self._shared.begin_step(self._rows, self._names)
            return self._shared.experts(layer, expert_ids, margin)


class RankedRunner(Runner):
    """Runs every step on all ranks."""

    def __init__(
        self,
        model: SparseMlaModel,
        ranks: Sequence[RankParts],
        policy: RoutePolicy,
        strategy: ShardStrategy = ShardStrategy.ROUND_ROBIN,
    ) -> None:
        super().__init__(model, ranks[0].pools, ranks[0].ops)
        self._ranks, self._policy, self._strategy = tuple(ranks), policy, strategy

    @torch.inference_mode()
    def run(
        self,
        batch: Batch | DecodeBatch,
        taps: Taps | None = None,
        ops: Operators | None = None,
        is_checked: bool = True,
    ) -> RunOutput:
        """Run one step on all ranks. ``ops`` and ``is_checked`` have no meaning here."""
        batch, taps = batch.eager(), taps or Taps()
        if taps.selection is not None:
            taps.selection.begin_step(batch.geometry.rows, batch.request_ids)
        hands = deal_rows(batch.geometry.rows, len(self._ranks), self._strategy)
        places = [torch.from_numpy(hand) for hand in hands]
        hidden, nan_rows = self._forward_ranks(batch, taps.selection, places)
        logits = self.logits(hidden.index_select(0, batch.logit_rows))
        if taps.logits is not None:
            self._tell(taps.logits, batch, hidden, logits)
        return RunOutput(
            logits=logits,
            verdict=Verdict(
                row_flags(hidden, nan_rows), batch.geometry.rows.host_rows(), batch.request_ids
            ),
            prompt_logprobs=self._score_prompts(batch, hidden),
        )

    def _forward_ranks(
        self, batch: Batch, tap: SelectionTap | None, hands: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(hidden [R, D], NaN rows [R]) of all rows; zeros where a row is padding."""
        lock = Lock()

        def one_rank(rank: SimulatedRank) -> ForwardOutput:
            shard = shard_rows(batch.geometry, rank.rank, rank.size, self._strategy)
            shard.check()
            own_tap = None
            if tap is not None:
                own_tap = RankTap(tap, shard.rows, batch.request_ids, lock)
            return self._forward_rank(batch, shard, rank, hands[rank.rank], own_tap)

        outputs, _ = run_ranks(len(self._ranks), one_rank)
        first = outputs[0]
        num_rows = batch.geometry.rows.num_rows
        hidden = first.hidden.data.new_zeros((num_rows, first.hidden.data.shape[1]))
        nan_rows = first.nan_rows.data.new_zeros(num_rows)
        for hand, output in zip(hands, outputs, strict=True):
            hidden[hand] = output.hidden.data[: len(hand)]
            nan_rows[hand] = output.nan_rows.data[: len(hand)]
        return hidden, nan_rows

    def _forward_rank(
        self,
        batch: Batch,
        shard: Geometry,
        rank: SimulatedRank,
        hand: Tensor,
        tap: RankTap | None,
    ) -> ForwardOutput:
        own = self._ranks[rank.rank]
        ids = batch.token_ids.data.new_zeros(shard.rows.num_rows)
        ids[: len(hand)] = batch.token_ids.data[hand]
        plan = plan_step(shard, self._model.config.attention_dims(), policy=self._policy)
        step = AttentionStep(shard, plan, own.pools, own.ops, tap, rank.all_gather)
        return self._model.forward(RowTensor(shard.rows, ids), step)
