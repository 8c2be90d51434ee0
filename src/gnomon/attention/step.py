"""AttentionStep: everything that a model's forward pass needs to know about one step.

In:  the step's geometry, its plan, the pools of the cache by part name, the bound operators and,
     when somebody listens, a tap; under context parallelism the collective that gathers rows.
Out: one frozen value that is handed down through the layers unchanged.
Not here: token ids and hidden states (the model's arguments), sampling, pages, collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gnomon.attention.geometry import Geometry, RowTensor, require_axis
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import StepPlan
from gnomon.attention.taps import SelectionTap
from gnomon.errors import GeometryError

AllGather = Callable[[Tensor], Tensor]
"""[R, ...] of this rank -> [ranks * R, ...], rank after rank; every rank calls it equally often."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """One step as the layers see it. Read-only; shared by all layers.

    ``all_gather``: None where this rank writes its own rows only (no context parallelism).
    GeometryError at birth if the plan is of other rows than the geometry: nothing is written then.
    """

    geometry: Geometry
    plan: StepPlan
    pools: Mapping[str, PagedPool]
    ops: Operators
    tap: SelectionTap | None = None
    all_gather: AllGather | None = None

    def __post_init__(self) -> None:
        if self.plan.axis is not self.geometry.rows:
            raise GeometryError(
                f"the plan is of '{self.plan.axis.label}', the geometry's rows are "
                f"'{self.geometry.rows.label}'; plan the geometry that is run"
            )

    def on_write_axis(self, value: RowTensor, group: str = "tokens") -> RowTensor:
        """A per-row value carried to the axis whose entries ``group`` writes in this step.

        That is the value itself, or, on a context-parallel shard, the gathered rows of all ranks:
        every rank writes every entry. Raises GeometryError for rows of another axis, or if the
        step has shards but no collective.
        """
        writes = self.geometry.writes[group]
        if value.axis is writes.axis:
            return value
        require_axis(writes.local or writes.axis, value=value)
        if self.all_gather is None:
            raise GeometryError(
                f"'{writes.axis.label}' gathers the rows of {len(writes.axis.rank_rows)} ranks, "
                "but this step has no all_gather; give AttentionStep the group's collective"
            )
        return RowTensor(writes.axis, self.all_gather(value.data))

    def pool(self, part: str) -> PagedPool:
        """The pool of a cache part, such as ``layers.3.latent``."""
        found = self.pools.get(part)
        if found is None:
            raise GeometryError(
                f"no pool for cache part {part!r}; this step has {sorted(self.pools)}. "
                "The model's cache_schema() must name every part that its layers touch"
            )
        return found
