"""AttentionStep: everything that a model's forward pass needs to know about one step.

In:  the step's geometry, its plan, the pools of the cache by part name, the bound operators and,
     when somebody listens, a tap.
Out: one frozen value that is handed down through the layers unchanged.
Not here: token ids and hidden states (the model's arguments), sampling, pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gnomon.attention.geometry import Geometry
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import StepPlan
from gnomon.attention.taps import SelectionTap
from gnomon.errors import GeometryError


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """One step as the layers see it. Read-only; shared by all layers."""

    geometry: Geometry
    plan: StepPlan
    pools: Mapping[str, PagedPool]
    ops: Operators
    tap: SelectionTap | None = None

    def pool(self, part: str) -> PagedPool:
        """The pool of a cache part, such as ``layers.3.latent``."""
        found = self.pools.get(part)
        if found is None:
            raise GeometryError(
                f"no pool for cache part {part!r}; this step has {sorted(self.pools)}. "
                "The model's cache_schema() must name every part that its layers touch"
            )
        return found
