"""`gnomon plan`: does a model fit a GPU, at which context and batch. Needs no GPU and no weights.

In:  a model (a folder, or a published name such as deepseek-v3.2), a GPU's name, how many of them,
     engine flags as for serve.
Out: where each GPU's memory goes, and how many requests of each context length the cache holds, or
     how many GPUs it would take. Exit code 1 if the model does not fit, 2 for wishes that no GPU
     of any size could grant.
Not here: the counts (engine/memory_plan.py), which libraries the GPU's machine has (gnomon explain
says it there). Running on several GPUs is for a later version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnomon.cli.flags import ModelArgument, with_flags, with_model
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError

if TYPE_CHECKING:
    from gnomon.engine.machine import Machine
    from gnomon.engine.resolve import ResolvedConfig
    from gnomon.models.config import ModelConfig

EXAMPLES = """\b
Examples:
  gnomon plan deepseek-v3.2 --gpu h200 --tp 8
  gnomon plan glm-5 --gpu h200 --tp 8 --kv-layout fp8_ds_mla --max-model-len 65536
  gnomon plan /models/DeepSeek-V3.2 --gpu b200 --tp 4 --json
"""
CONTEXTS = (2048, 8192, 32768, 65536, 131072, 262144, 1048576)
MOST_RANKS = 64
BOUNDLESS = 1 << 56  # bytes of a GPU on which nothing fails for lack of memory
BACKENDS = (
    "attention_provider",
    "prefill_backend",
    "decode_backend",
    "index_backend",
    "linear_backend",
    "moe_backend",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan", epilog=EXAMPLES)(with_flags(config=EngineConfig)(plan))


@dataclass(frozen=True, slots=True)
class Answer:
    """What the command prints."""

    model: str
    gpu: str
    num_ranks: int
    fits: bool
    lines: list[str]
    num_cached_tokens: int
    contexts: dict[int, int]  # context length -> requests of that length that run at once
    least_ranks: int | None  # GPUs that it takes, where it does not fit
    weights: str = ""  # FP8 weights: whether they stay so, and why


def plan(
    model_argument: ModelArgument = None,
    gpu: Annotated[str, typer.Option(help="GPU by name, such as h200, h100, b200.")] = "h200",
    tp: Annotated[int, typer.Option(help="GPUs that share the model.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Say whether a model fits GPUs that need not be here, and at which context and batch."""
    answer = answer_of(with_model(config, model_argument), gpu, tp)
    if as_json:
        print(json.dumps({name: getattr(answer, name) for name in answer.__slots__}, indent=2))
    else:
        _print(answer)
    if not answer.fits:
        raise typer.Exit(1)


def answer_of(config: EngineConfig, gpu: str, num_ranks: int) -> Answer:
    """Plan one rank of `num_ranks`."""
    from gnomon.engine.machine import known_gpu, require_new_enough

    machine = known_gpu(gpu)
    require_new_enough(machine)
    label, model = _model(config)
    _require_meaning(config)
    _require_ranks(label, model, num_ranks)
    found = _resolved(config, model, machine, num_ranks)
    if isinstance(found, Misfit):
        return Answer(label, gpu, num_ranks, False, found.lines, 0, {}, found.least_ranks)
    assert found.memory is not None
    group = found.schema.groups[0]
    pages = found.num_pages[group.name] - 1
    contexts = {
        length: min(pages // -(-length // group.tokens_per_page), found.max_num_seqs)
        for length in sorted({*CONTEXTS, found.max_model_len})
        if length <= found.max_model_len
    }
    tokens, weights = pages * group.tokens_per_page, ""
    if model.quantization is not None:
        chosen = found.fields["weights"]
        weights = f"{chosen.value} ({chosen.reason or chosen.source})"
    lines = found.memory.shown()
    return Answer(label, gpu, num_ranks, True, lines, tokens, contexts, None, weights)


def _require_meaning(config: EngineConfig) -> None:
    """ConfigError for flags that could only be ignored here."""
    from gnomon.attention.providers import builtin_providers
    from gnomon.attention.providers.external import external_providers

    if config.device == "cpu":
        raise ConfigError("device is 'cpu': plan is for GPUs. Leave --device out, or say --gpu.")
    providers = (*builtin_providers(), *external_providers(config.provider_path))
    known = sorted({"triton", *(provider.name for provider in providers)})
    for flag in BACKENDS:
        name = getattr(config, flag)
        if name not in ("auto", *known):
            raise ConfigError(
                f"{flag} is {name!r}: there is no such provider. There are {', '.join(known)}; or "
                f"leave {flag} out."
            )


def _ranks_of(model: ModelConfig) -> list[int]:
    """Numbers of GPUs that share the model's heads evenly."""
    heads = model.num_attention_heads
    return [ranks for ranks in range(1, MOST_RANKS + 1) if heads % ranks == 0]


def _require_ranks(label: str, model: ModelConfig, num_ranks: int) -> None:
    allowed = _ranks_of(model)
    if num_ranks not in allowed:
        raise ConfigError(
            f"tp is {num_ranks}: {label} has {model.num_attention_heads} heads, of which each GPU "
            f"takes as many, and plans go to {MOST_RANKS} GPUs. Allowed are "
            f"{', '.join(map(str, allowed))}."
        )


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why the model does not fit, and how many GPUs would hold it."""

    lines: list[str]
    least_ranks: int | None


def _model(config: EngineConfig) -> tuple[str, ModelConfig]:
    from gnomon.models.config_reading import read_config
    from gnomon.models.published_shapes import PUBLISHED, published_shape
    from gnomon.models.sources import parse_model_spec

    shape = published_shape(config.model) if config.model else None
    if config.model and shape is not None:
        return config.model, read_config(shape, config.hf_overrides)
    try:
        source = parse_model_spec(config.model, overrides=config.hf_overrides)
    except ConfigError as error:
        raise ConfigError(f"{error} Published shapes: {', '.join(PUBLISHED)}.") from error
    return source.label, source.config


def _resolved(
    config: EngineConfig, model: ModelConfig, machine: Machine, num_ranks: int
) -> ResolvedConfig | Misfit:
    """The configuration on one of the ranks, or why there is none.

    ConfigError for what no memory would mend.
    """
    boundless = replace(machine, free_bytes=BOUNDLESS, total_bytes=BOUNDLESS)
    _resolve(config, model, boundless, num_ranks)
    try:
        return _resolve(config, model, machine, num_ranks)
    except ConfigError as error:
        lines = str(error).splitlines()
        for ranks in _ranks_of(model):
            if ranks > num_ranks and _fits(config, model, machine, ranks):
                return Misfit(lines, ranks)
        return Misfit(lines, None)


def _fits(config: EngineConfig, model: ModelConfig, machine: Machine, num_ranks: int) -> bool:
    try:
        _resolve(config, model, machine, num_ranks)
    except ConfigError:
        return False
    return True


def _resolve(
    config: EngineConfig, model: ModelConfig, machine: Machine, num_ranks: int
) -> ResolvedConfig:
    import torch

    from gnomon.engine.memory_plan import weight_bytes_of
    from gnomon.engine.resolve import resolve
    from gnomon.models.quantised import keeps_fp8

    dtype: Any = model.torch_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    has_fp8 = keeps_fp8(config.weights, model.quantization, machine.device, machine.capability)
    weights = weight_bytes_of(model, dtype, num_ranks, has_fp8)
    return resolve(config, model, machine, weights, num_ranks)


def _print(answer: Answer) -> None:
    count = "" if answer.num_ranks == 1 else f"{answer.num_ranks} x "
    print(f"{answer.model} on {count}{answer.gpu}: {'fits' if answer.fits else 'does not fit'}")
    for line in answer.lines:
        print(f"  {line}")
    if not answer.fits:
        if answer.least_ranks is not None:
            print(f"{answer.least_ranks} GPUs of this kind would hold it (--tp)")
        return
    if answer.weights:
        print(f"FP8 weights: {answer.weights}")
    print(f"cache: {answer.num_cached_tokens:,} tokens on each GPU")
    for length, requests in answer.contexts.items():
        print(f"  {requests:>8,} x {length:>9,} tokens run at once")
    if answer.num_ranks > 1:
        print("this version plans several GPUs, but runs on one: --tp comes to serve later")
