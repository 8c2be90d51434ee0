"""Engines as laws need them: over loaded weights, listened to, broken on purpose, captured.

In:  what an engine consists of (Survey), weights, an Arm.
Out: `build_engine`: a TracedCore with an empty cache. Where the cache rounds, its values pass over
     a tape, and the steps of each operator run one by one (cached_values.py); with captured steps
     there is no tape, and the listener is a runner (captured.py).
Errors: NotRunError where steps are to be captured and cannot be.
Not here: flags (context.py), what runs are compared with (law.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import Budget
from gnomon.attention.routes import DensePolicy, RoutePolicy
from gnomon.attention.sharding import ShardStrategy
from gnomon.cache.tensors import CacheTensors
from gnomon.engine.assembly import Parts, Survey, put_together
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import OutputDelta
from gnomon.models.sources import LoadedModel
from gnomon.models.sparse_mla_model import SparseMlaModel
from gnomon.verify.cached_values import CacheTape, TapedOperators, TapeOfRanks, rounds
from gnomon.verify.captured import CapturedRunner, ReplayRecorder, TwinRunner
from gnomon.verify.forced_tokens import ForcedSampler
from gnomon.verify.ranks import RankedRunner, RankParts
from gnomon.verify.result import NotRunError
from gnomon.verify.roughness import Roughness, roughness_of

CAPTURED_TOKENS = 128  # prefill steps of up to so many rows are captured between attentions


class Capture(StrEnum):
    """What becomes of decode and short prefill steps. TWIN: captured, each run again eagerly."""

    NONE = "none"
    FREE = "free"
    TWIN = "twin"


@dataclass(frozen=True, slots=True)
class Handicap:
    """A feature broken on purpose: config fields for the engines, an edit of the loaded model."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[SparseMlaModel], None] = lambda model: None


@dataclass(frozen=True, slots=True)
class Arm:
    """How an engine differs from the plain one: flags, row padding, budget, ranks, capture."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    rows: int | None = None
    budget: Budget | None = None
    ranks: int = 1
    strategy: ShardStrategy = ShardStrategy.ROUND_ROBIN
    label: str = ""
    capture: Capture = Capture.NONE


class TracedCore(EngineCore):
    """An engine that asks before each step whether there is time for it.

    `tape`: over which its cache's values pass, where the cache rounds. `captured`: the runner that
    listens where steps are captured. `roughness`: of its arithmetic.
    """

    def __init__(
        self,
        parts: Parts,
        check_time: Callable[[], None],
        tape: CacheTape | None = None,
        roughness: Roughness | None = None,
    ) -> None:
        self.sampler = ForcedSampler(0)
        super().__init__(replace(parts, sampler=self.sampler))
        self._check_time = check_time
        self.tape, self.roughness = tape, roughness
        runner = parts.runner
        self.captured = runner if isinstance(runner, CapturedRunner) else None

    def step(self) -> list[OutputDelta]:
        """Bring the requests forward by one step."""
        self._check_time()
        return super().step()


def build_engine(
    found: Survey, loaded: LoadedModel, arm: Arm, check_time: Callable[[], None]
) -> TracedCore:
    """A fresh engine (module docstring)."""
    if arm.capture is not Capture.NONE:
        return _captured_engine(found, loaded, arm, check_time)
    tapes = [CacheTape() for _ in range(arm.ranks)] if cache_rounds(found) else []
    operators: list[Operators] = [TapedOperators(found.ops.kernels, tape) for tape in tapes]
    if operators:  # decode steps run with them too, and none is captured
        found = replace(found, ops=operators[0], decode_ops=None, graph_ops=None)
    parts = put_together(found, loaded, arm.rows, arm.budget)
    if arm.ranks > 1:
        others = operators or [found.ops] * arm.ranks
        parts = replace(parts, runner=_ranked(parts, found, loaded, arm, others))
    tape = TapeOfRanks(tapes) if tapes else None
    return TracedCore(parts, check_time, tape, roughness_of(found))


def _captured_engine(
    found: Survey, loaded: LoadedModel, arm: Arm, check_time: Callable[[], None]
) -> TracedCore:
    is_gpu = found.resolved.device.type == "cuda"
    if is_gpu and found.graph_ops is None:
        raise NotRunError(
            "decode steps cannot be captured with these providers: `gnomon explain` says which"
        )
    recorder = None if is_gpu else ReplayRecorder()
    parts = put_together(
        found, loaded, arm.rows, arm.budget, recorder=recorder, captured_tokens=CAPTURED_TOKENS
    )
    if arm.capture is Capture.TWIN:
        usual = found.graph_ops or found.ops
        runner: CapturedRunner = TwinRunner(parts.runner, Operators(usual.kernels))
    else:
        runner = CapturedRunner(parts.runner)
    return TracedCore(replace(parts, runner=runner), check_time, None, roughness_of(found))


def cache_rounds(found: Survey) -> bool:
    """Whether the cache of such an engine keeps less of a value than the model computes."""
    resolved = found.resolved
    layouts = (resolved.latent_layout, resolved.index_layout)
    return any(rounds(layout, resolved.dtype) for layout in layouts)


def _ranked(
    parts: Parts, found: Survey, loaded: LoadedModel, arm: Arm, operators: Sequence[Operators]
) -> RankedRunner:
    """A runner over ranks: the first has the engine's own cache, the others one like it."""
    resolved, own = found.resolved, parts.cache
    caches = [own] + [
        CacheTensors(own.schema, resolved.num_pages, resolved.device) for _ in range(arm.ranks - 1)
    ]
    ranks = [RankParts(one.pools, ops) for one, ops in zip(caches, operators, strict=True)]
    policy = RoutePolicy(DensePolicy(resolved.given.dense_route))
    return RankedRunner(loaded.model, ranks, policy, arm.strategy)
