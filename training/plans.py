"""The plans: which stages a model goes through, in order.

In:  a name.
Out: `PLANS[name]`: stages of (steps, tokens a row, rows, dense or sparse, what text).
Why so: retrieval forms fastest on short rows with many questions; then rows grow, still dense,
while the indexers learn from the heads; then the selection is switched on. From there on every
third round stays dense: a model that sees long texts through its lists alone forgets how to attend
to all of them (86 % at 4,096 tokens against 99 %), and sparse attention must equal dense. A third
left dense recall at 4,096 tokens at 93 %, so that the long texts of the last stage are half dense.
GLM's model starts from the other one's twin (twin.py). Trained from nothing, the look-up formed in
layers that listen to the indexer of an earlier one, which cannot foresee what will be looked up
(dense recall 94 to 100 %, sparse 17 to 78 %); sparse from step 200 on, it did not form at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from training.data.mixture import Diet
from training.data.writing import Family


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` batches, in rows of `lengths` tokens, which take turns; all of them once is a round.

    Of a sparse stage every `dense_every`-th round attends densely; 0: none does.
    """

    name: str
    steps: int
    lengths: tuple[int, ...]
    is_sparse: bool = False
    diet: Diet = field(default_factory=Diet)
    dense_every: int = 0

    def is_sparse_at(self, step: int) -> bool:
        """Whether step `step` of this stage attends the chosen keys only."""
        if not self.is_sparse or not self.dense_every:
            return self.is_sparse
        return step // len(self.lengths) % self.dense_every != self.dense_every - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages of batches of `tokens`; the share of all steps in which the rates fall to nothing.

    `family`: the chat format that is measured.
    """

    shape: str
    tokens: int
    stages: tuple[Stage, ...]
    family: Family = "dsv32"
    cooldown: float = 0.75
    warmup: int = 100
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    index_rate: float = 2e-3

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
_LONG = (4096, 1024, 2048, 512, 4096, 2048, 8192, 256)
_LAST = Diet(recall=0.47, sums=0.26, tools=0.17)
_POLISH = Diet(recall=0.48, sums=0.18, tools=0.25, prose=0.05, talk=0.04, glm=0.3)
_FINISH = Diet(recall=0.44, sums=0.28, tools=0.18, prose=0.05, talk=0.05, glm=0.3)
_GLM = 0.9  # share of GLM's format in the text of GLM's model


def _mixed(
    name: str, steps: int, lengths: tuple[int, ...], diet: Diet, dense_every: int = 3
) -> Stage:
    return Stage(name, steps, lengths, is_sparse=True, diet=diet, dense_every=dense_every)


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
            Stage("mixed", 2, (256,), is_sparse=True, dense_every=2),
        ),
    ),
    "tiny": Plan(
        "tiny",
        32768,
        (
            Stage("dense 256", 2000, (256,), diet=_SHORT),
            Stage("dense 1k", 3000, (512, 256, 1024)),
            Stage("dense 4k", 3200, (1024, 4096, 512, 2048)),
            _mixed("mixed", 4400, _MIXED, _LAST),
            _mixed("long", 2008, _LONG, _LAST, 2),
        ),
    ),
    "polish": Plan(  # from a trained model, `--start`
        "tiny",
        32768,
        (_mixed("polish", 3000, _LONG, _POLISH, 2),),
        cooldown=1.0,
        matrix_rate=8e-3,
        other_rate=1.2e-3,
        index_rate=1e-3,
    ),
    "finish": Plan(  # from a polished model, `--start`: the rate falls from where polish ended
        "tiny",
        32768,
        (_mixed("finish", 904, _LONG, _FINISH, 2),),
        cooldown=1.0,
        matrix_rate=3e-3,
        other_rate=4e-4,
        index_rate=4e-4,
    ),
    "glm": Plan(  # from the trained model's twin, `--start`
        "tiny_glm",
        32768,
        (_mixed("twin", 2408, _LONG, replace(_POLISH, glm=_GLM), 2),),
        family="glm",
        cooldown=1.0,
        matrix_rate=8e-3,
        other_rate=1.2e-3,
        index_rate=1e-3,
    ),
    "glm_finish": Plan(  # from what "glm" made, `--start`
        "tiny_glm",
        32768,
        (_mixed("finish", 696, _LONG, replace(_FINISH, glm=_GLM), 2),),
        family="glm",
        cooldown=1.0,
        matrix_rate=3e-3,
        other_rate=4e-4,
        index_rate=4e-4,
    ),
}
