"""The plans: which stages a model goes through, in order.

In:  a name.
Out: `PLANS[name]`: stages of (steps, tokens a row, rows, dense or sparse, what text).
Why so: retrieval forms fastest on short rows with many questions; then rows grow, still dense,
while the indexers learn from the heads; then the selection is switched on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from training.data.mixture import Diet


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` batches, in rows of `lengths` tokens, which take turns."""

    name: str
    steps: int
    lengths: tuple[int, ...]
    is_sparse: bool = False
    diet: Diet = field(default_factory=Diet)


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages of batches of `tokens`; the share of all steps in which the rates fall to nothing."""

    shape: str
    tokens: int
    stages: tuple[Stage, ...]
    cooldown: float = 0.75
    warmup: int = 100
    matrix_rate: float = 0.02
    other_rate: float = 3e-3

    @property
    def num_steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def factor(self, step: int) -> float:
        """Factor on the learning rates: up, level, down in a straight line."""
        left = (self.num_steps - step) / (self.cooldown * self.num_steps)
        return min(1.0, (step + 1) / self.warmup, max(left, 0.02))


_SHORT = Diet(recall=0.62, sums=0.30, tools=0.0, prose=0.05, talk=0.03)
_ONLY_RECALL = Diet(recall=1.0, sums=0.0, tools=0.0, prose=0.0, talk=0.0, glm=0.0)
_MIXED = (4096, 512, 2048, 256, 1024, 8192, 512, 4096, 1024, 2048)
_LAST = Diet(recall=0.47, sums=0.26, tools=0.17)
PLANS: dict[str, Plan] = {
    "tenth": Plan(
        "tenth",
        1536,
        (
            Stage("dense 128", 2000, (128,), diet=_ONLY_RECALL),
            Stage("sparse 256", 400, (256, 128), is_sparse=True, diet=_ONLY_RECALL),
        ),
    ),
    "smoke": Plan(  # every path once, on any machine
        "tiny",
        2048,
        (
            Stage("dense", 2, (256, 2048)),
            Stage("sparse", 3, (2048, 512, 256), is_sparse=True),
        ),
    ),
    "tiny": Plan(
        "tiny",
        32768,
        (
            Stage("dense 256", 2000, (256,), diet=_SHORT),
            Stage("dense 1k", 3500, (512, 256, 1024)),
            Stage("dense 4k", 3500, (1024, 4096, 512, 2048)),
            Stage("sparse", 4400, _MIXED, is_sparse=True, diet=_LAST),
        ),
    ),
}
