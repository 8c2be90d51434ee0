"""What all laws of one verification share: the model, engines over it, prompts, reference runs.

In:  VerifySettings.
Out: `Context`. `engine(...)` makes an engine of any configuration over weights that are loaded once
     per (fields of config.json, dtype). `reference(prompts)` runs each prompt alone, whole, without
     prefix cache, once: the run that the laws of the engine compare with.
Everything is float32 unless --dtype or a law says otherwise. With a cache layout that rounds, the
values that a run writes are kept and replayed (cached_values.py).
A verification may run in rounds: each has other prompts, for the seed grows by one (rounds.py).
`handicap` changes the engines and not the oracle: with it gnomon's own tests break one feature at a
time and see that a law fails.
Not here: the laws, transformers (oracle.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gnomon.engine.assembly import Survey, survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.engine.machine import probe_machine
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.models.config import ModelConfig
from gnomon.models.sources import LoadedModel, ModelSource, parse_model_spec
from gnomon.verify.budget import TimeBudget
from gnomon.verify.engines import (
    Arm,
    Capture,
    Handicap,
    TracedCore,
    build_engine,
    cache_rounds,
)
from gnomon.verify.prompts import Prompt, PromptRule, draw_prompts
from gnomon.verify.result import OutOfTimeError, Tally
from gnomon.verify.roughness import Roughness, roughness_of
from gnomon.verify.settings import Sizes, VerifySettings
from gnomon.verify.trace import Staging, Trace, drive
from gnomon.verify.weights import Weights
from gnomon.verify.widths import widths_for

__all__ = ["MATES", "Arm", "Context", "Handicap", "Progress"]

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # (law, done, total)

MATES = 32  # requests that an engine of the laws runs at once
CPU_PAGE = 16  # tokens, unless --block-size says else
GPU_PAGE = 64  # what FlashMLA and DeepGEMM read


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
        self._models: dict[tuple[str, torch.dtype, str, bool], LoadedModel] = {}
        self._weights = Weights()
        self._constants: dict[str, Any] = {}
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
        topk, page = self.config.index_topk, self.block_size
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

    def once_for_all(self, key: str, compute: Callable[[], T]) -> T:
        """The same of what no round changes."""
        if key not in self._constants:
            self._constants[key] = compute()
        value: T = self._constants[key]
        return value

    def engine_prompts(self) -> list[Prompt]:
        """The prompts of the laws of the engine."""
        count, seed = self.sizes.engine_prompts, self.settings.seed
        return self.once("engine", lambda: draw_prompts(self.rule, count, seed, "engine"))

    @property
    def block_size(self) -> int:
        """Tokens of a page: what was asked for, or what kernels of the device are built for."""
        given = self.settings.block_size
        if given is not None:
            return given
        return GPU_PAGE if self.device == "cuda" else CPU_PAGE

    @property
    def device(self) -> str:
        """ "cpu" or "cuda". ConfigError for a device that is not there."""
        return self.once_for_all("device", lambda: probe_machine(self.settings.device).device)

    def survey(self, arm: Arm | None = None) -> Survey:
        """What an engine would consist of."""
        arm = arm or Arm()
        settings, given = self.settings, dict(arm.flags)
        overrides = {**self.overrides, **given.pop("hf_overrides", {})}
        overrides |= self._handicap.overrides
        length = self.longest + self.sizes.max_tokens
        pages = 2 + (MATES + 1) * -(-length // self.block_size)
        flags: dict[str, Any] = {
            **settings.engine_flags(),
            "device": self.device,
            "block_size": self.block_size,
            "num_kv_pages": pages,
            "max_model_len": min(length + 1, self.config.max_position_embeddings),
            "enforce_eager": arm.capture is Capture.NONE,
            "enable_prefix_caching": False,
        }
        if arm.capture is not Capture.NONE:
            flags["max_num_seqs"] = MATES
        config = EngineConfig.of(**{**flags, **given, "hf_overrides": overrides})
        return survey(config, self._vocab_size)

    def engine(self, arm: Arm | None = None) -> TracedCore:
        """A fresh engine with an empty cache; its cache's values pass over a tape if it rounds."""
        arm = arm or Arm()
        found = self.survey(arm)
        return build_engine(found, self._loaded(found), arm, self.check_time)

    def cache_rounds(self, arm: Arm | None = None) -> bool:
        """Whether the cache of such an engine keeps less of a value than the model computes."""
        return cache_rounds(self.survey(arm))

    def roughness(self, arm: Arm | None = None) -> Roughness | None:
        """Of such an engine's arithmetic; None for float32 and finer."""
        return roughness_of(self.survey(arm))

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
        resolved = found.resolved
        room = min(self.longest + self.sizes.max_tokens + 1, self.config.max_position_embeddings)
        limit = max(resolved.max_model_len, room)  # tables may be longer than an engine needs
        overrides = json.dumps([resolved.given.hf_overrides, limit], sort_keys=True)
        key = (overrides, resolved.dtype, str(resolved.device), resolved.has_fp8)
        if key not in self._models:
            loaded = self._weights.open(
                found.source, resolved.dtype, resolved.device, limit, resolved.has_fp8
            )
            self._handicap.edit(loaded.model)
            self._models[key] = loaded
        return self._models[key]
