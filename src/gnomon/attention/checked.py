"""Checked mode: every operator between its rules, for all layers or for one now and then.

In:  bound Operators, the names of their providers, how much to check.
Out: StepChecker: `begin_step` gives the operators to run a step with: the plain ones where nothing
     is checked (then nothing is paid), else CheckedOperators. Violations of one request are kept
     for whoever runs the step, all others raise NumericsError (checks/inspector.py).
FULL checks every call of every step, with poisoned padding and scratch. SAMPLED checks every layer
once in at most 256 steps, in turn; every call of it is held to the rules. One row of each call of
attention is recomputed, of other operators in every fourth visit.
Maths and rules: checks/. Not here: free pages (the engine poisons them), the flag (engine/config).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from gnomon.attention.checks.effort import TURNS
from gnomon.attention.checks.faults import Fault, Violation
from gnomon.attention.checks.inspector import CallRows, Inspector
from gnomon.attention.checks.kernel import CheckedKernel
from gnomon.attention.checks.lists import count_faults, list_faults, order_faults
from gnomon.attention.geometry import Geometry, PageTable, RowTensor, WriteSlots
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import AttentionOut, IndexTransform, RopeRows, Selection
from gnomon.attention.plan import StepPlan

__all__ = ["CheckLevel", "CheckedOperators", "StepChecker", "Violation", "layers_to_check"]

STEPS_OF_A_ROUND = 256  # sampled: every layer is looked at within so many steps


class CheckLevel(StrEnum):
    """How much is checked."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


def visits_of_a_round(num_layers: int) -> int:
    """The steps in which SAMPLED looks at something until it has seen every layer."""
    layers_at_once = max(1, -(-num_layers // STEPS_OF_A_ROUND))
    return max(1, -(-num_layers // layers_at_once))


def layers_to_check(step: int, num_layers: int) -> range:
    """The layers that SAMPLED looks at in step number ``step`` (from 0): mostly none, else one.

    Within any 256 steps in a row each layer has its turn; of models with more than 256 layers
    several are looked at in a step.
    """
    interval = max(1, STEPS_OF_A_ROUND // max(1, num_layers))
    if step % interval or num_layers < 1:
        return range(0)
    width = -(-num_layers // STEPS_OF_A_ROUND)
    first = step // interval % visits_of_a_round(num_layers) * width
    return range(first, min(first + width, num_layers))


class StepChecker:
    """Chooses what is checked in each step, counts, and keeps what was found in the last one."""

    def __init__(
        self,
        ops: Operators,
        providers: Mapping[str, str],
        level: CheckLevel,
        num_layers: int,
        num_pages: Mapping[str, int] | None = None,
        isolates: bool = True,
    ) -> None:
        """``providers``: operator to provider name. ``num_pages``: of each group's pools.

        ``isolates``: keep violations that concern one request instead of raising them.
        """
        self.level = level
        self._plain = ops
        self._providers = providers
        self._num_layers = num_layers
        self._num_pages = num_pages
        self._inspector = Inspector(level is CheckLevel.FULL, isolates)
        self._checked = self._checking(ops)
        self._step = -1
        self._visit = -1  # steps in which something was checked

    @property
    def num_checks(self) -> int:
        """Calls of kernels checked since the start."""
        return self._inspector.num_checks

    @property
    def num_violations(self) -> int:
        """Violations since the start: at most one a step for each request, and all that raised."""
        return self._inspector.num_violations

    def begin_step(
        self,
        geometry: Geometry,
        plan: StepPlan,
        request_ids: Sequence[str] = (),
        ops: Operators | None = None,
    ) -> Operators:
        """The operators for this step: the usual ones, or ``ops``, checked if the step is to be.

        Raises GeometryError if a step to be checked is wrong.
        """
        self._step += 1
        layers: frozenset[int] | None = None
        if self.level is not CheckLevel.FULL:
            due = layers_to_check(self._step, self._num_layers)
            layers = frozenset(due if self.level is CheckLevel.SAMPLED else ())
        if layers is not None and not layers:
            self._inspector.begin_step(plan, request_ids, layers)
            return ops or self._plain
        self._visit += 1
        round_, place = divmod(self._visit, visits_of_a_round(self._num_layers))
        turn = (round_ + place) % TURNS  # so that a layer has another turn in every round
        self._inspector.begin_step(plan, request_ids, layers, turn)
        if layers is None or turn == 0:
            geometry.check(self._num_pages)
        return self._checked if ops is None or ops is self._plain else self._checking(ops)

    def skip_step(self) -> bool:
        """True, and the step is counted, if nothing of the next step is to be checked.

        For whoever runs a step by operators that cannot be looked at (a captured graph).
        """
        due = layers_to_check(self._step + 1, self._num_layers)
        if self.level is CheckLevel.FULL or (self.level is CheckLevel.SAMPLED and due):
            return False
        self._step += 1
        return True

    def _checking(self, ops: Operators) -> CheckedOperators:
        return CheckedOperators(ops, self._providers, self._inspector)

    def violations(self) -> tuple[Violation, ...]:
        """What was found in the step begun last, at most one violation for each request."""
        return self._inspector.violations()


class CheckedOperators(Operators):
    """Operators whose kernels are checked; says of each call on which rows it runs."""

    def __init__(self, ops: Operators, providers: Mapping[str, str], inspector: Inspector) -> None:
        self._inner = ops
        self._inspector = inspector
        self._providers = {**providers, **ops.providers}
        super().__init__(
            {
                op: CheckedKernel(op, kernel, self._providers.get(op, "unknown"), inspector)
                for op, kernel in ops.kernels.items()
            },
            self._providers,
            products=ops.products,
        )

    def begin_layer(self, layer: int) -> None:
        """From here on the calls are of this layer."""
        self._inspector.begin_layer(layer)
        self._inner.begin_layer(layer)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As Operators.rms_norm."""
        self._inspector.stand_on_step(x.shape[0])
        return super().rms_norm(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """As Operators.layer_norm."""
        self._inspector.stand_on_step(x.shape[0])
        return super().layer_norm(x, weight, bias, eps)

    def rope(self, x: Tensor, rows: RopeRows) -> Tensor:
        """As Operators.rope."""
        self._inspector.rows = CallRows(rows.axis)
        return super().rope(x, rows)

    def latent_write(
        self,
        kv_raw: RowTensor,
        norm_weight: Tensor,
        eps: float,
        rope: RopeRows,
        pool: PagedPool,
        writes: WriteSlots,
    ) -> None:
        """As Operators.latent_write."""
        self._inspector.rows = self._inspector.write_rows = CallRows(writes.axis)
        super().latent_write(kv_raw, norm_weight, eps, rope, pool, writes)

    def index_prepare(
        self,
        q_raw: RowTensor,
        k_raw: RowTensor,
        transform: IndexTransform,
        rope: tuple[RopeRows, RopeRows],
        pool: PagedPool,
        writes: WriteSlots,
    ) -> RowTensor:
        """As Operators.index_prepare."""
        self._inspector.rows = CallRows(q_raw.axis)
        self._inspector.write_rows = CallRows(writes.axis)
        return super().index_prepare(q_raw, k_raw, transform, rope, pool, writes)

    def index_select(
        self,
        query: RowTensor,
        head_weights: RowTensor,
        pool: PagedPool,
        geometry: Geometry,
        plan: StepPlan,
        want_margin: bool = False,
    ) -> Selection:
        """As Operators.index_select; the lists of all rows are checked once more, whole."""
        inspector = self._inspector
        inspector.stand_on_chunks(query.axis, plan)
        chosen = super().index_select(query, head_weights, pool, geometry, plan, want_margin)
        if inspector.is_active:
            inspector.rows = CallRows(query.axis)
            inspector.num_checks += 1
            for fault in _selection_faults(chosen, plan):
                inspector.report("index_select", self._providers.get("topk", "unknown"), fault)
        return chosen

    def sparse_mla(
        self,
        q_latent: RowTensor,
        q_rope: RowTensor,
        pool: PagedPool,
        keys: KeySet,
        table: PageTable,
        scale: float,
    ) -> AttentionOut:
        """As Operators.sparse_mla; the key set is checked first, on the rows' own kv_len."""
        inspector = self._inspector
        inspector.rows = CallRows(q_latent.axis)
        if inspector.is_active:
            for fault in _key_set_faults(keys, table.tokens_per_entry):
                inspector.report("sparse_mla", "caller", fault)
        return super().sparse_mla(q_latent, q_rope, pool, keys, table, scale)

    def dense_mha(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As Operators.dense_mha; calls follow the pieces of the plan's context chunks."""
        self._inspector.stand_on_piece(q.shape[0])
        return super().dense_mha(q, k, v, visible, scale)

    def context_gather(
        self, pool: PagedPool, table: PageTable, request: int, start: int, stop: int
    ) -> Tensor:
        """As Operators.context_gather; rows are the entries read."""
        self._inspector.rows = CallRows(request=request, first=start)
        return super().context_gather(pool, table, request, start, stop)

    def moe(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        """As Operators.moe."""
        self._inspector.stand_on_step(x.shape[0])
        return super().moe(x, expert_ids, expert_weights, gate_up, down)


def _selection_faults(chosen: Selection, plan: StepPlan) -> Iterator[Fault]:
    axis, segment = chosen.keys.axis, chosen.keys.segments[0]
    most = plan.dims.index_topk or plan.index_width
    expected = axis.kv_len.clamp_max(most)
    yield from count_faults(segment.count, expected, "the smaller of K and the row's kv_len")
    yield from _key_set_faults(chosen.keys, 1)


def _key_set_faults(keys: KeySet, tokens_per_entry: int) -> Iterator[Fault]:
    """Lists in range of what each row sees, ascending (in POSITION space), each id once."""
    visible = torch.div(keys.axis.kv_len, tokens_per_entry, rounding_mode="floor")
    for segment in keys.segments:
        if isinstance(segment, ListSegment):
            is_position = segment.space is Space.POSITION
            top: Tensor | int = visible if is_position else torch.iinfo(segment.ids.dtype).max
            yield from list_faults(segment.ids, segment.count, (0, top))
            yield from order_faults(segment.ids, segment.count, is_position)
        else:
            yield from count_faults(
                (segment.start + segment.count).minimum(visible) - segment.start,
                segment.count,
                "what is left of the row's keys from the range's start",
            )
