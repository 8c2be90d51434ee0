"""Turn an EngineConfig into numbers: what was given, what the model says, what the machine holds.

In:  EngineConfig (flags), ModelConfig (config.json), Machine (device and memory).
Out: ResolvedConfig: every field with a value, where the value came from and why, the cache's
     layouts and pages. ConfigError before any weight is read if the wishes do not fit.
Pages come out of a byte budget: never more than all seats of full length need, never so few that
one request of full length does not fit; an unstated max_model_len yields to the budget.
Not here: loading, allocation (assembly.py), checks of single fields (flags.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from gnomon.attention.checked import CheckLevel
from gnomon.attention.layouts import IndexKeyDims, KVLayout, LatentDims, choose_layout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.layouts.registry import candidates
from gnomon.attention.routes import DensePolicy
from gnomon.cache.budget import pages_for_budget
from gnomon.cache.schema import CacheSchema
from gnomon.engine.captured_rows import captured_rows
from gnomon.engine.config import EngineConfig, parse_bytes
from gnomon.engine.fixed_bits import require_fixed_bits
from gnomon.engine.machine import GIB, Machine, require_left
from gnomon.engine.memory_plan import MemoryPlan, StepSizes, plan_memory, require_room
from gnomon.engine.step_checks import check_level
from gnomon.errors import ConfigError
from gnomon.models.config import ModelConfig
from gnomon.models.quantised import keeps_fp8, why_kept
from gnomon.models.registry import cache_schema

MAX_DEFAULT_CACHE_BYTES = 4 * GIB  # on a CPU: a laptop's memory belongs to others too
CACHE_SHARE = 0.5  # of the memory that is free, where nothing is stated
DEFAULT_NUM_SEQS = 256
DEFAULT_NUM_TOKENS = 2048
GROUP = "tokens"
CAPTURED = "max_captured_prefill_tokens"


@dataclass(frozen=True, slots=True)
class Resolution:
    """A field's value, its source ("flag", "environment", "default", ...) and the reason."""

    value: Any
    source: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """All that the assembly of an engine needs to know (module docstring)."""

    given: EngineConfig
    fields: Mapping[str, Resolution]
    dtype: torch.dtype
    device: torch.device
    latent_layout: KVLayout
    index_layout: KVLayout
    schema: CacheSchema
    num_pages: Mapping[str, int]  # by cache group, the null page included
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    check: CheckLevel
    max_captured_prefill_tokens: int = 0  # 0: prefill is not captured
    memory: MemoryPlan | None = None  # of a GPU
    has_fp8: bool = False  # FP8 weights stay FP8

    def table(self) -> dict[str, tuple[Any, str, str]]:
        """Name -> (value, source, reason), in the order of the fields."""
        return {name: (r.value, r.source, r.reason) for name, r in self.fields.items()}


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    machine: Machine,
    weight_bytes: int = 0,
    num_ranks: int = 1,
) -> ResolvedConfig:
    """All values. `weight_bytes`: what the weights will take on each of `num_ranks` devices."""
    found = _Findings(config)
    dtype = _dtype(found, model, machine.device)
    check, source = check_level(config.check, os.environ)
    found.note("check", str(check), source)
    found.note("device", machine.device, "machine", "a GPU if there is one")
    has_fp8 = _has_fp8(found, model, machine)
    num_seqs, num_tokens = _step_limits(found)
    latent, index = _layouts(found, model, dtype, machine.device)
    schema = cache_schema(model, config.block_size, latent, index)
    captured = found.note(CAPTURED, *captured_rows(config, machine.device, num_tokens))
    memory = None
    if machine.device == "cuda":
        longest = config.max_model_len or model.max_position_embeddings
        sizes = StepSizes(num_tokens, num_seqs, longest, not config.enforce_eager, captured)
        memory = plan_memory(
            model, dtype, sizes, machine, config.gpu_memory_utilization, weight_bytes, num_ranks
        )
        require_room(memory)
    left = _left_on_host(machine, weight_bytes) if memory is None else memory.cache_bytes
    num_pages, max_model_len = _cache_size(found, model, machine, schema, left)
    found.note("max_prefill_chunk", num_tokens, "default", "as many as a step holds")
    found.note("kv_layout", latent.id, "model", f"plain numbers in {dtype}")
    found.note_others()
    return ResolvedConfig(
        given=config,
        fields={entry.name: found.fields[entry.name] for entry in fields(config)},
        dtype=dtype,
        device=torch.device(machine.device),
        latent_layout=latent,
        index_layout=index,
        schema=schema,
        num_pages=num_pages,
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        check=check,
        max_captured_prefill_tokens=captured,
        memory=memory,
        has_fp8=has_fp8,
    )


class _Findings:
    """Resolutions so far; a field that was given, or noted before, keeps its value."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.fields: dict[str, Resolution] = {
            name: Resolution(value, "flag")
            for name, value in config.given().items()
            if value not in (None, "auto")
        }

    def value(self, name: str) -> Any:
        """The value that a field has by now."""
        return self.fields[name].value

    def note_others(self) -> None:
        """Fields without a value keep what the configuration has."""
        for entry in fields(self.config):
            is_given = entry.name in self.config.given()
            value = getattr(self.config, entry.name)
            self.note(entry.name, value, "flag" if is_given else "default")

    def note(self, name: str, value: Any, source: str, reason: str = "") -> Any:
        """Set a field unless it has a value; the value it has then."""
        return self.fields.setdefault(name, Resolution(value, source, reason)).value


def _dtype(found: _Findings, model: ModelConfig, device: str) -> torch.dtype:
    name = str(model.torch_dtype).removeprefix("torch.")
    chosen = found.note("dtype", name, "model", "what its config.json says")
    dtype = getattr(torch, chosen)
    assert isinstance(dtype, torch.dtype)
    if found.config.deterministic:
        require_fixed_bits(found.config, dtype, device)
        found.note(
            "dense_route", str(DensePolicy.NEVER), "deterministic", "one route, one rounding"
        )
    return dtype


def _has_fp8(found: _Findings, model: ModelConfig, machine: Machine) -> bool:
    """Whether FP8 weights stay FP8; said of models that have some."""
    place = machine.device, machine.capability
    has_fp8 = keeps_fp8(found.config.weights, model.quantization, *place)
    if model.quantization is not None:
        why = why_kept(has_fp8, model.quantization, *place)
        found.note("weights", "fp8" if has_fp8 else "dequantise", "machine", why)
    return has_fp8


def _step_limits(found: _Findings) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens): a step has to hold a row of every running request."""
    seqs, tokens = found.config.max_num_seqs, found.config.max_num_batched_tokens
    if seqs is not None and tokens is not None and tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {tokens} and max_num_seqs is {seqs}: a step could not "
            "hold one token of each running request. Raise the former or lower the latter."
        )
    default_tokens = max(DEFAULT_NUM_TOKENS, seqs or 0)
    num_tokens = found.note("max_num_batched_tokens", default_tokens, "default")
    reason = "no more than max_num_batched_tokens" if num_tokens < DEFAULT_NUM_SEQS else ""
    return found.note(
        "max_num_seqs", min(DEFAULT_NUM_SEQS, num_tokens), "default", reason
    ), num_tokens


def _layouts(
    found: _Findings, model: ModelConfig, dtype: torch.dtype, device: str
) -> tuple[KVLayout, KVLayout]:
    """Layouts of latents and of index keys.

    On a GPU a half-precision model's index keys are FP8 whatever its latents are: so the models
    were trained, and that is what fast kernels read. Elsewhere they follow the latents' kind.
    """
    latent_dims = LatentDims(model.kv_lora_rank, model.qk_rope_head_dim)
    latent = choose_layout(found.config.kv_layout, latent_dims, dtype)
    index_dims, wished = IndexKeyDims(model.index_head_dim), found.config.index_layout
    if wished != "auto":
        return latent, choose_layout(wished, index_dims, dtype)
    plain = "fp8"
    if isinstance(latent, PlainLayout):
        plain = str(latent.stored_dtype).removeprefix("torch.")
    kind, why = plain, "of the same kind as the latents"
    if device == "cuda" and dtype.itemsize == 2 and _holds_fp8(index_dims, dtype):
        kind, why = "fp8", "the format that these models were trained for"
    index = choose_layout(kind, index_dims, dtype)
    found.note("index_layout", index.id, "default", why)
    return latent, index


def _left_on_host(machine: Machine, weight_bytes: int) -> int:
    """Bytes beside the weights, 0 where nobody knows. ConfigError if they do not fit."""
    left = machine.free_bytes - weight_bytes
    if machine.free_bytes and left < 0:
        raise ConfigError(
            f"the weights take {weight_bytes / GIB:.1f} GiB and {machine.free_bytes / GIB:.1f} GiB "
            "of memory are free. Choose a smaller model or a narrower dtype, or free memory."
        )
    return max(0, left)


def _holds_fp8(dims: IndexKeyDims, dtype: torch.dtype) -> bool:
    return any(not isinstance(layout, PlainLayout) for layout in candidates(dims, dtype))


def _cache_size(
    found: _Findings,
    model: ModelConfig,
    machine: Machine,
    schema: CacheSchema,
    left: int,
) -> tuple[dict[str, int], int]:
    """(pages by group, the null pages included; max_model_len). `left`: bytes beside all else."""
    config, limit = found.config, model.max_position_embeddings
    longest = config.max_model_len or limit
    if longest > limit:
        raise ConfigError(
            f"max_model_len is {longest}, but the model has max_position_embeddings = {limit}. "
            "Lower the former, or raise the latter by hf_overrides if the model can."
        )
    budget, source, reason = _budget(config, machine, left)
    seats, step = found.value("max_num_seqs"), found.value("max_num_batched_tokens")
    if config.num_kv_pages is not None:
        budget, reason = config.num_kv_pages * schema.bytes_per_page(GROUP), "num_kv_pages"
        require_left(f"num_kv_pages is {config.num_kv_pages}", budget, machine, left)
    pages = pages_for_budget(schema, budget, max_num_requests=seats, num_step_tokens=step)
    size = schema.group(GROUP).tokens_per_page
    capacity = (pages[GROUP] - 1) * size
    if config.max_model_len is not None and capacity < longest:
        raise ConfigError(
            f"one request of max_model_len = {longest} tokens needs {-(-longest // size) + 1} "
            f"cache pages of {size} tokens, the null page included, but there are {pages[GROUP]} "
            f"({reason}). Lower max_model_len, or raise kv_cache_memory or num_kv_pages."
        )
    held = min(longest, capacity)
    why = "max_position_embeddings" if held == limit else f"what the cache holds: {reason}"
    found.note("max_model_len", held, "model" if held == limit else source, why)
    enough = seats * -(-held // size) + 1
    why = "all seats at full length" if enough < pages[GROUP] else reason
    pages[GROUP] = min(pages[GROUP], enough) if config.num_kv_pages is None else pages[GROUP]
    num_bytes = sum(schema.bytes_per_page(name) * count for name, count in pages.items())
    found.note("num_kv_pages", pages[GROUP], source, why)
    found.note("kv_cache_memory", str(num_bytes), source, why)
    return pages, held


def _budget(config: EngineConfig, machine: Machine, left: int) -> tuple[int, str, str]:
    """(bytes for the cache, source, reason)."""
    if config.gpu_memory_utilization is not None and machine.device == "cpu":
        raise ConfigError(
            'gpu_memory_utilization is for CUDA; on a CPU set kv_cache_memory, as "4GiB".'
        )
    if config.kv_cache_memory is not None:
        budget = parse_bytes(config.kv_cache_memory)
        require_left(f"kv_cache_memory is {config.kv_cache_memory}", budget, machine, left)
        return budget, "flag", "kv_cache_memory"
    if machine.device == "cuda":
        return left, "machine", f"{left / GIB:.1f} GiB of GPU memory beside the weights"
    budget = min(MAX_DEFAULT_CACHE_BYTES, int(CACHE_SHARE * left))
    return budget, "machine", f"a default budget of {budget / GIB:.1f} GiB on this machine"
