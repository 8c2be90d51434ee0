"""What all laws of one verification share: the model, engines over it, prompts, reference runs.

In:  VerifySettings.
Out: `Context`. `engine(...)` makes an engine of any configuration over weights that are loaded once
     per (fields of config.json, dtype). `reference(prompts)` runs each prompt alone, whole, without
     prefix cache, once: the run that the laws of the engine compare with.
Everything is float32 unless a law says otherwise. With a cache layout that rounds, the values that
a run writes are kept and replayed (cached_values.py).
A verification may run in rounds: each has other prompts, for the seed grows by one (rounds.py).
`handicap` changes the engines and not the oracle: with it gnomon's own tests break one feature at a
time and see that a law fails.
Not here: the laws, transformers (oracle.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import Budget
from gnomon.attention.routes import DensePolicy, RoutePolicy
from gnomon.attention.sharding import ShardStrategy
from gnomon.cache.tensors import CacheTensors
from gnomon.engine.assembly import Parts, Survey, put_together, survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.models.config import ModelConfig
from gnomon.models.sources import LoadedModel, ModelSource, open_model, parse_model_spec
from gnomon.models.sparse_mla_model import SparseMlaModel
from gnomon.verify.budget import TimeBudget
from gnomon.verify.cached_values import CacheTape, TapedOperators, TapeOfRanks, rounds
from gnomon.verify.prompts import Prompt, PromptRule, draw_prompts
from gnomon.verify.ranks import RankedRunner, RankParts
from gnomon.verify.result import OutOfTimeError, Tally
from gnomon.verify.settings import Sizes, VerifySettings
from gnomon.verify.trace import Staging, Trace, TracedCore, drive
from gnomon.verify.widths import widths_for

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # (law, done, total)

MATES = 32  # requests that an engine of the laws runs at once


@dataclass(frozen=True, slots=True)
class Handicap:
    """A feature broken on purpose: config fields for the engines, an edit of the loaded model."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[SparseMlaModel], None] = lambda model: None


@dataclass(frozen=True, slots=True)
class Arm:
    """How an engine differs from the plain one: flags, row padding, budget, simulated ranks."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    rows: int | None = None
    budget: Budget | None = None
    ranks: int = 1
    strategy: ShardStrategy = ShardStrategy.ROUND_ROBIN
    label: str = ""


class Context:
    """Owner of loaded models and reference runs. Laws run one after another."""

    def __init__(
        self,
        settings: VerifySettings,
        progress: Progress | None = None,
        handicap: Handicap | None = None,
        budget: TimeBudget | None = None,
        layouts: Sequence[str] = (),
        default_vocab_size: int | None = None,
    ) -> None:
        """`layouts`: further ones that engines of this context will have.

        `default_vocab_size`: of a random model that names none.
        """
        self.settings = settings
        self.widths: dict[str, object] = {}
        for layout in (settings.kv_layout, *layouts):
            self.widths |= widths_for(settings.model, settings.hf_overrides, layout)
        self.overrides = {**self.widths, **settings.hf_overrides}
        self._vocab_size = default_vocab_size
        self.source: ModelSource = parse_model_spec(
            settings.model, overrides=self.overrides, default_vocab_size=default_vocab_size
        )
        self.budget = budget
        self.counted = Tally()
        self.sizes: Sizes = settings.sizes
        self._seed = settings.seed
        self._progress = progress or (lambda law, done, total: None)
        self._handicap = handicap or Handicap()
        self._law = ""
        self._models: dict[tuple[str, torch.dtype], LoadedModel] = {}
        self._references: dict[Prompt, Trace] = {}
        self._kept: dict[str, Any] = {}

    @property
    def config(self) -> ModelConfig:
        """The model's own configuration."""
        return self.source.config

    @property
    def longest(self) -> int:
        """The longest prompt, in tokens: what was asked for, or what the model holds."""
        room = self.config.max_position_embeddings - self.sizes.max_tokens
        return max(1, min(self.sizes.max_length, room))

    @property
    def rule(self) -> PromptRule:
        """What prompts for this model have in common."""
        topk, page = self.config.index_topk, self.settings.block_size
        return PromptRule(self.config.vocab_size, topk, page, self.longest)

    def begin_round(self, number: int) -> None:
        """Round 0 has the prompts of the seed that was given, round n those of the n-th after it.

        What the laws of a round share is forgotten with it.
        """
        self.settings = replace(self.settings, seed=self._seed + number)
        self._references.clear()
        self._kept.clear()

    def begin(self, law: str) -> None:
        """A law begins; `step` reports under its name."""
        self._law = law
        self.counted = Tally()

    def tally(self, unit: str = "logit") -> Tally:
        """An empty tally for the law that runs; `counted` stays what it has counted so far."""
        self.counted = Tally(unit)
        return self.counted

    def step(self, done: int, total: int) -> None:
        """Tell how far the law is. Raises OutOfTimeError if there is a budget and it is spent."""
        self._progress(self._law, done, total)
        self.check_time()

    def check_time(self) -> None:
        """Raise OutOfTimeError if there is a budget and it is spent."""
        if self.budget is not None and self.budget.is_over:
            raise OutOfTimeError

    def once(self, key: str, compute: Callable[[], T]) -> T:
        """The value of `compute`, computed by the first law that asks for it."""
        if key not in self._kept:
            self._kept[key] = compute()
        value: T = self._kept[key]
        return value

    def engine_prompts(self) -> list[Prompt]:
        """The prompts of the laws of the engine."""
        count, seed = self.sizes.engine_prompts, self.settings.seed
        return self.once("engine", lambda: draw_prompts(self.rule, count, seed, "engine"))

    def survey(self, arm: Arm | None = None) -> Survey:
        """What an engine would consist of."""
        settings, given = self.settings, dict((arm or Arm()).flags)
        overrides = {**self.overrides, **given.pop("hf_overrides", {})}
        overrides |= self._handicap.overrides
        length = self.longest + self.sizes.max_tokens
        pages = 2 + (MATES + 1) * -(-length // settings.block_size)
        flags: dict[str, Any] = {
            "model": settings.model,
            "dtype": "float32",
            "block_size": settings.block_size,
            "num_kv_pages": pages,
            "max_model_len": min(length + 1, self.config.max_position_embeddings),
            "attention_provider": settings.attention_provider,
            "kv_layout": settings.kv_layout,
            "enforce_eager": True,
            "enable_prefix_caching": False,
        }
        config = EngineConfig.of(**{**flags, **given, "hf_overrides": overrides})
        return survey(config, self._vocab_size)

    def engine(self, arm: Arm | None = None) -> EngineCore:
        """A fresh engine with an empty cache; its cache's values pass over a tape if it rounds."""
        arm = arm or Arm()
        found = self.survey(arm)
        loaded = self._loaded(found)
        tapes = [CacheTape() for _ in range(arm.ranks)] if _rounds(found) else []
        operators: list[Operators] = [TapedOperators(found.ops.kernels, tape) for tape in tapes]
        if operators:  # decode steps run with them too, and none is captured
            found = replace(found, ops=operators[0], decode_ops=None, graph_ops=None)
        parts = put_together(found, loaded, arm.rows, arm.budget)
        if arm.ranks > 1:
            others = operators or [found.ops] * arm.ranks
            parts = replace(parts, runner=_ranked(parts, found, loaded, arm, others))
        return TracedCore(parts, self.check_time, TapeOfRanks(tapes) if tapes else None)

    def cache_rounds(self, arm: Arm | None = None) -> bool:
        """Whether the cache of such an engine keeps less of a value than the model computes."""
        return _rounds(self.survey(arm))

    def request(self, name: str, prompt: Prompt, **fields: Any) -> EngineRequest:
        """A greedy request for `sizes.max_tokens` tokens; sampling fields by their names."""
        own = {"choice", "fork_of", "priority", "cache_salt", "arrival_s"}
        params: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": self.sizes.max_tokens,
            "ignore_eos": True,
        }
        params |= {key: value for key, value in fields.items() if key not in own}
        return EngineRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            params=SamplingParams(**params),
            **{key: value for key, value in fields.items() if key in own},
        )

    def reference(self, prompts: Sequence[Prompt]) -> list[Trace]:
        """Each prompt's run alone, whole and cold."""
        core: EngineCore | None = None
        for number, prompt in enumerate(prompts):
            if prompt not in self._references:
                core = core or self.engine()
                request = self.request("alone", prompt)
                self._references[prompt] = drive(core, [request])["alone"]
            self.step(number, len(prompts))
        return [self._references[prompt] for prompt in prompts]

    def run(
        self, arm: Arm, requests: Sequence[EngineRequest], staging: Staging | None = None
    ) -> dict[str, Trace]:
        """Requests through a fresh engine, all at once unless `staging` says else."""
        return drive(self.engine(arm), requests, staging)

    def _loaded(self, found: Survey) -> LoadedModel:
        dtype, limit = found.resolved.dtype, found.resolved.max_model_len
        overrides = found.resolved.given.hf_overrides
        key = (json.dumps([overrides, limit], sort_keys=True), dtype)
        if key not in self._models:
            device = found.resolved.device
            loaded = open_model(found.source, dtype, device, num_positions=limit)
            self._handicap.edit(loaded.model)
            self._models[key] = loaded
        return self._models[key]


def _rounds(found: Survey) -> bool:
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
