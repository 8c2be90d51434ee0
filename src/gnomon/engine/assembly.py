"""Put an engine together: from flags to the parts that EngineCore drives.

In:  EngineConfig, a callback for progress.
Out: `survey`: what is chosen and why, with nothing loaded (`gnomon explain` prints it). `assemble`:
     Parts: scheduler, batch builder, runner, sampler, and the EngineInfo for the front of the
     house. The order is the promise: flags, config.json, layouts, providers and page counts are
     checked (ConfigError) before a weight is read, weights before the cache is allocated.
Not here: the loop (core.py), values of the configuration (resolve.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gnomon import __version__
from gnomon.attention.checked import CheckLevel, StepChecker
from gnomon.attention.dispatch import Choice, OpNeed
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import Budget
from gnomon.attention.providers import absent_providers, builtin_providers
from gnomon.attention.providers.external import external_providers
from gnomon.attention.recording import Recording
from gnomon.cache.pages import PagePool
from gnomon.cache.tensors import CacheTensors
from gnomon.engine.batch import BatchBuilder, BatchRules
from gnomon.engine.captures import Kind, capture_steps
from gnomon.engine.config import EngineConfig
from gnomon.engine.device_probe import probe_driver
from gnomon.engine.graphs import Recorder
from gnomon.engine.info import engine_info
from gnomon.engine.machine import Machine, probe_machine, shortcomings
from gnomon.engine.memory_plan import weight_bytes_of
from gnomon.engine.operators import bind_phases, phase_rows
from gnomon.engine.record import RecordRules, StepRecorder
from gnomon.engine.record_witness import Subject, Witness
from gnomon.engine.resolve import ResolvedConfig, resolve
from gnomon.engine.runner import Runner
from gnomon.engine.sampler import Sampler
from gnomon.engine.scheduler import Scheduler
from gnomon.engine.shadow import Shadow
from gnomon.engine.start_log import start_lines
from gnomon.engine.step_checks import PagePoison
from gnomon.engine.step_rules import (
    batch_rules,
    graph_rules,
    overlaps,
    prefill_graph_rules,
    require_overlap,
    scheduler_config,
    with_overrides,
)
from gnomon.engine.warm_up import warm_up
from gnomon.engine.wire import EngineInfo
from gnomon.models.config import ModelConfig
from gnomon.models.params import param_dtype, param_specs
from gnomon.models.quantised import keeps_fp8
from gnomon.models.sources import LoadedModel, ModelSource, open_model, parse_model_spec

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (stage, done, total)


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
    overlaps: bool = False  # a step is queued before the one ahead of it has landed


@dataclass(frozen=True, slots=True)
class Survey:
    """All that is known, chosen and checked before a weight is read."""

    source: ModelSource
    resolved: ResolvedConfig
    ops: Operators
    choices: tuple[Choice, ...]
    recording: RecordRules | None = None
    graph_ops: Operators | None = None  # for captured decode steps; None: every step runs eagerly
    decode_ops: Operators | None = None  # for eager decode steps; None: ``ops``
    decode_choices: tuple[Choice, ...] = ()
    segment_ops: Operators | None = None  # for captured parts of prefill; None: it runs eagerly

    def operator_rows(self) -> list[tuple[str, str, str, str]]:
        """Who runs what and why, phase by phase where they differ."""
        return phase_rows(self.choices, self.decode_choices or self.choices)


def survey(config: EngineConfig, default_vocab_size: int | None = None) -> Survey:
    """Check everything and load nothing. `default_vocab_size`: of a random model without one."""
    source = parse_model_spec(
        config.model,
        overrides=config.hf_overrides,
        default_vocab_size=default_vocab_size,
        default_seed=config.seed,
    )
    model = source.config
    probed = probe_driver(config, probe_machine(config.device))
    machine = probed.machine
    for lack in (*shortcomings(machine), *probed.words()):
        logger.warning("%s", lack)
    resolved = resolve(config, model, machine, _weight_bytes(model, config, machine))
    require_overlap(resolved)
    need = OpNeed(
        device=machine.device,
        dtype=resolved.dtype,
        dims=model.attention_dims(),
        latent_layout=resolved.latent_layout.id,
        index_layout=resolved.index_layout.id,
        is_deterministic=config.deterministic,
        page_size=config.block_size,
        capability=machine.capability,
        num_experts=model.n_routed_experts,
    )
    outside = external_providers(config.provider_path)
    providers = (*builtin_providers(), *absent_providers(), *outside)
    is_eager = config.enforce_eager or bool(probed.no_graphs)
    has_graphs = machine.device == "cuda" and not is_eager
    bound = bind_phases(config, need, providers, has_graphs, resolved.has_fp8)
    return Survey(
        source,
        resolved,
        bound.usual,
        bound.choices,
        RecordRules.of(config),
        bound.graph,
        bound.decode,
        bound.decode_choices,
        bound.segments,
    )


def assemble(
    config: EngineConfig, progress: Progress, default_vocab_size: int | None = None
) -> Parts:
    """Check, load, allocate (module docstring)."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    found = survey(config, default_vocab_size)
    progress("device", 1, 1)
    if found.recording is not None:
        found.recording.prepare()
    resolved = found.resolved
    for line in start_lines(resolved, found.operator_rows()):
        logger.info("%s", line)
    loaded = open_model(
        found.source,
        resolved.dtype,
        resolved.device,
        lambda step: progress("weights", step.bytes_done, step.bytes_total),
        num_positions=resolved.max_model_len,
        has_fp8=resolved.has_fp8,
    )
    if found.source.folder is None:
        progress("random weights", 1, 1)
    parts = put_together(found, loaded, progress=progress)
    if resolved.device.type == "cuda" and resolved.check is not CheckLevel.FULL:
        warm_up(parts, progress)
    return parts


def put_together(
    found: Survey,
    loaded: LoadedModel,
    rows: int | None = None,
    budget: Budget | None = None,
    progress: Progress | None = None,
    recorder: Recorder | None = None,
    captured_tokens: int | None = None,
) -> Parts:
    """An engine over a model that is loaded already: a cache of its own, the weights shared.

    `loaded` has the config of `found.source` and positions for `found.resolved.max_model_len`.
    `rows` (a step is padded to a multiple of it) and `budget` change no answer; gnomon.verify
    gives others than the default to show it. `recorder`: of captured steps, where it is not CUDA's;
    `captured_tokens`: of the largest prefill step that is, where it is not the configuration's.
    """
    resolved, model, config = found.resolved, found.source.config, found.resolved.given
    cache, pages = _cache(found, loaded)
    has_decode_graphs = recorder is not None or found.graph_ops is not None
    rules = batch_rules(resolved, model.attention_dims(), found.choices, has_decode_graphs)
    rules = with_overrides(rules, rows, budget)
    checker = _checker(found, resolved)
    most = resolved.max_captured_prefill_tokens if captured_tokens is None else captured_tokens
    kinds = _captured_kinds(found, rules, most, pages.groups)
    graphs = capture_steps(loaded.model, cache.pools, kinds, recorder, progress)
    runner = Runner(
        loaded.model,
        cache.pools,
        found.ops,
        rules.row_multiple,
        checker,
        graphs,
        found.decode_ops,
    )
    if resolved.check is CheckLevel.FULL:
        pages.on_change_of_hands = PagePoison(cache).changes_hands
    info = engine_info(resolved, loaded, found.operator_rows(), cache)
    return Parts(
        scheduler=Scheduler(scheduler_config(resolved), pages),
        builder=BatchBuilder(rules, pages.groups),
        runner=runner,
        sampler=Sampler(config.seed),
        cache=cache,
        info=info,
        checker=checker,
        witness=_witness(found, loaded, runner, cache),
        overlaps=overlaps(resolved),
    )


def _cache(found: Survey, loaded: LoadedModel) -> tuple[CacheTensors, PagePool]:
    resolved = found.resolved
    schema = resolved.schema.for_model(
        revision=loaded.revision,
        dtype=str(resolved.dtype),
        quantisation=repr(found.source.config.quantization),
    )
    groups = {g.name: (resolved.num_pages[g.name], g.tokens_per_page) for g in schema.groups}
    cache = CacheTensors(schema, resolved.num_pages, resolved.device)
    return cache, PagePool(groups, schema.namespace_id())


def _captured_kinds(
    found: Survey, rules: BatchRules, most: int, groups: Sequence[str]
) -> tuple[Kind | None, Kind | None]:
    """What is captured: decode, if the rules of batches say so; prefill of up to ``most`` rows."""
    sizes = graph_rules(rules, found.resolved.max_model_len, groups)
    decode = Kind(found.graph_ops or found.ops, sizes) if sizes.buckets else None
    in_prefill = prefill_graph_rules(sizes, rules, most)
    if in_prefill is None or found.resolved.check is CheckLevel.FULL:
        return decode, None
    if found.segment_ops is None and found.resolved.device.type == "cuda":
        return decode, None
    return decode, Kind(found.segment_ops or found.ops, in_prefill)


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
    return Witness(runner, subject, recorder, shadow)


def _weight_bytes(model: ModelConfig, config: EngineConfig, machine: Machine) -> int:
    """Bytes of the loaded weights, before the dtype is settled: "auto" is the model's own."""
    dtype = model.torch_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if keeps_fp8(config.weights, model.quantization, machine.device, machine.capability):
        return weight_bytes_of(model, dtype)
    return sum(
        math.prod(spec.shape) * param_dtype(spec, dtype).itemsize for spec in param_specs(model)
    )
