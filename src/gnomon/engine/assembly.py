"""Put an engine together: from flags to the parts that EngineCore drives.

In:  EngineConfig, a callback for progress.
Out: `survey`: what is chosen and why, with nothing loaded (`gnomon explain` prints it). `assemble`:
     Parts: scheduler, batch builder, runner, sampler, and the EngineInfo for the front of the
     house. The order is the promise: flags, config.json, layouts, providers and page counts are
     checked (ConfigError) before a weight is read, weights before the cache is allocated.
Not here: the loop (core.py), values of the configuration (resolve.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gnomon import __version__
from gnomon.attention.checked import CheckLevel, StepChecker
from gnomon.attention.dispatch import Choice, OpNeed, bind_operators, explain_rows
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import Budget
from gnomon.attention.providers import builtin_providers
from gnomon.attention.recording import Recording
from gnomon.attention.routes import DensePolicy, RoutePolicy
from gnomon.cache.pages import PagePool
from gnomon.cache.tensors import CacheTensors
from gnomon.engine.batch import BatchBuilder, BatchRules
from gnomon.engine.config import EngineConfig
from gnomon.engine.record import RecordRules, StepRecorder
from gnomon.engine.record_witness import Subject, Witness
from gnomon.engine.resolve import ResolvedConfig, probe_machine, resolve
from gnomon.engine.runner import Runner
from gnomon.engine.sampler import Sampler
from gnomon.engine.schedule_config import SchedulerConfig
from gnomon.engine.scheduler import Scheduler
from gnomon.engine.shadow import Shadow
from gnomon.engine.step_checks import PagePoison
from gnomon.engine.wire import EngineInfo
from gnomon.models.config import ModelConfig
from gnomon.models.params import param_dtype, param_specs
from gnomon.models.sources import LoadedModel, ModelSource, open_model, parse_model_spec

Progress = Callable[[str, int, int], None]  # (stage, done, total)

FIXED_ROW_MULTIPLE = 16  # see batch.py


@dataclass(frozen=True, slots=True)
class Parts:
    """The owners of an engine's state, ready to run."""

    scheduler: Scheduler
    builder: BatchBuilder
    runner: Runner
    sampler: Sampler
    cache: CacheTensors
    info: EngineInfo
    checker: StepChecker | None = None  # what checked mode has found; None if it is off
    witness: Witness | None = None  # runs the steps where some are recorded or shadowed


@dataclass(frozen=True, slots=True)
class Survey:
    """All that is known, chosen and checked before a weight is read."""

    source: ModelSource
    resolved: ResolvedConfig
    ops: Operators
    choices: tuple[Choice, ...]
    recording: RecordRules | None = None


def survey(config: EngineConfig, default_vocab_size: int | None = None) -> Survey:
    """Check everything and load nothing. `default_vocab_size`: of a random model without one."""
    source = parse_model_spec(
        config.model,
        overrides=config.hf_overrides,
        default_vocab_size=default_vocab_size,
        default_seed=config.seed,
    )
    model = source.config
    machine = probe_machine(config.device)
    resolved = resolve(config, model, machine, _weight_bytes(model, config))
    need = OpNeed(
        device=machine.device,
        dtype=resolved.dtype,
        dims=model.attention_dims(),
        latent_layout=resolved.latent_layout.id,
        index_layout=resolved.index_layout.id,
        is_deterministic=config.deterministic,
    )
    forced = None if config.attention_provider == "auto" else config.attention_provider
    ops, choices = bind_operators(need, builtin_providers(), forced)
    return Survey(source, resolved, ops, choices, RecordRules.of(config))


def assemble(
    config: EngineConfig, progress: Progress, default_vocab_size: int | None = None
) -> Parts:
    """Check, load, allocate (module docstring)."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    found = survey(config, default_vocab_size)
    if found.recording is not None:
        found.recording.prepare()
    resolved = found.resolved
    loaded = open_model(
        found.source,
        resolved.dtype,
        resolved.device,
        lambda step: progress("weights", step.bytes_done, step.bytes_total),
        num_positions=resolved.max_model_len,
    )
    return put_together(found, loaded)


def put_together(
    found: Survey, loaded: LoadedModel, rows: int | None = None, budget: Budget | None = None
) -> Parts:
    """An engine over a model that is loaded already: a cache of its own, the weights shared.

    `loaded` has the config of `found.source` and positions for `found.resolved.max_model_len`.
    `rows` (a step is padded to a multiple of it) and `budget` change no answer; gnomon.verify
    gives others than the default to show it.
    """
    resolved, model, config = found.resolved, found.source.config, found.resolved.given
    schema = resolved.schema.for_model(
        revision=loaded.revision,
        dtype=str(resolved.dtype),
        quantisation=repr(model.quantization),
    )
    cache = CacheTensors(schema, resolved.num_pages, resolved.device)
    groups = {g.name: (resolved.num_pages[g.name], g.tokens_per_page) for g in schema.groups}
    pages = PagePool(groups, schema.namespace_id())
    rules = BatchRules(
        dims=model.attention_dims(),
        page_size=config.block_size,
        device=resolved.device,
        row_multiple=rows or (FIXED_ROW_MULTIPLE if config.deterministic else 1),
        budget=budget or Budget(),
        policy=RoutePolicy(DensePolicy(config.dense_route)),
    )
    checker = _checker(found, resolved)
    runner = Runner(loaded.model, cache.pools, found.ops, rules.row_multiple, checker)
    if resolved.check is CheckLevel.FULL:
        pages.on_change_of_hands = PagePoison(cache).changes_hands
    info = _info(resolved, loaded, found.choices, cache)
    return Parts(
        scheduler=Scheduler(_scheduler_config(config, resolved), pages),
        builder=BatchBuilder(rules, pages.groups),
        runner=runner,
        sampler=Sampler(config.seed),
        cache=cache,
        info=info,
        checker=checker,
        witness=_witness(found, loaded, runner, cache),
    )


def _checker(found: Survey, resolved: ResolvedConfig) -> StepChecker | None:
    """Whoever checks steps, if the level asks for it."""
    if resolved.check is CheckLevel.OFF:
        return None
    providers = {choice.op: choice.provider.name for choice in found.choices}
    num_layers = found.source.config.num_hidden_layers
    return StepChecker(found.ops, providers, resolved.check, num_layers, resolved.num_pages)


def _witness(
    found: Survey, loaded: LoadedModel, runner: Runner, cache: CacheTensors
) -> Witness | None:
    """Whoever records or shadows steps, if the flags ask for one of them."""
    config, rules = found.resolved.given, found.recording
    if rules is None and not config.shadow:
        return None
    recorder = None if rules is None else StepRecorder(rules)
    subject = Subject(
        origin={
            "gnomon": __version__,
            "torch": torch.__version__,
            "model": loaded.label,
            "revision": loaded.revision,
            "dtype": str(found.resolved.dtype).removeprefix("torch."),
            "device": found.resolved.device.type,
        },
        dims=loaded.config.attention_dims(),
        hidden_size=loaded.config.hidden_size,
        providers={choice.op: choice.provider.name for choice in found.choices},
        pools=cache.pools,
    )

    def keep(recording: Recording) -> None:
        if recorder is not None:
            recorder.keep(recording, "shadow")

    shadow = Shadow(config.shadow, keep) if config.shadow else None
    return Witness(runner, found.ops, subject, recorder, shadow)


def _weight_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of the loaded weights, before the dtype is settled: "auto" is the model's own."""
    dtype = model.torch_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    return sum(
        math.prod(spec.shape) * param_dtype(spec, dtype).itemsize for spec in param_specs(model)
    )


def _scheduler_config(config: EngineConfig, resolved: ResolvedConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk or 0,
        policy="priority" if config.scheduling_policy == "priority" else "fcfs",
        # A burst waits in whole until the next step seats it; who may be in flight may wait.
        max_queue=resolved.max_num_seqs + config.max_queue_size,
        enable_prefix_cache=config.enable_prefix_caching,
    )


def _info(
    resolved: ResolvedConfig,
    loaded: LoadedModel,
    choices: Sequence[Choice],
    cache: CacheTensors,
) -> EngineInfo:
    config, schema = resolved.given, cache.schema
    return EngineInfo(
        model_label=loaded.label,
        model_type=str(loaded.config.model_type),
        revision=loaded.revision,
        folder=None if loaded.folder is None else str(loaded.folder),
        tokenizer=config.tokenizer,
        vocab_size=loaded.config.vocab_size,
        max_model_len=resolved.max_model_len,
        max_in_flight=resolved.max_num_seqs + config.max_queue_size,
        drain_timeout_s=config.drain_timeout_s,
        eos_token_ids=loaded.generation_defaults.eos_token_ids,
        generation_defaults=dict(loaded.generation_defaults.sampling),
        resolved=resolved.table(),
        operators=explain_rows(choices),
        cache={
            "latent_layout": resolved.latent_layout.id,
            "index_layout": resolved.index_layout.id,
            "bytes": cache.num_bytes,
            "prefix_step_tokens": schema.prefix_step_tokens or 0,
            "index_topk": loaded.config.index_topk,
            "layers": loaded.config.num_hidden_layers,
            "layers_that_select": loaded.config.indexer_types.count("full"),
            **{f"pages.{name}": count for name, count in resolved.num_pages.items()},
        },
    )
