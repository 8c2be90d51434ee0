"""From what a user calls a model to a model that can run.

In:  a folder, "random:FAMILY,key=value,...", "builtin:NAME" for a small trained model that ships
     with gnomon, or None for the first of these (assets/tiny); then dtype and device.
Out: `parse_model_spec` -> `ModelSource`: the checked config and where weights come from, nothing
     read but config.json; `open_model` -> `LoadedModel`: the model with its weights.
     `ConfigError` for an unknown spelling (with the nearest known one), a folder that is not there,
     a hub id (gnomon downloads nothing).
Not here: tokenizers, which the engine never sees; the caller passes the vocabulary's size.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gnomon.errors import ConfigError
from gnomon.models.built_in import folder_of
from gnomon.models.checkpoint import Checkpoint, read_checkpoint
from gnomon.models.config import Family, ModelConfig
from gnomon.models.config_reading import NEEDS_FILES, read_config
from gnomon.models.generation_defaults import GenerationDefaults, read_generation_defaults
from gnomon.models.load_plan import Extra, extras_summary, plan_load
from gnomon.models.loading import ProgressCallback, load_planned
from gnomon.models.random_model import random_weights
from gnomon.models.random_spec import RANDOM_PREFIX, parse_random_spec, random_shape
from gnomon.models.registry import build_model
from gnomon.models.sparse_mla_model import SparseMlaModel

logger = logging.getLogger(__name__)

RANDOM_EXAMPLE = f"{RANDOM_PREFIX}{Family.DEEPSEEK_V32},layers=4"
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was named and checked but not loaded. `seed` counts where `folder` is None."""

    label: str
    config: ModelConfig
    folder: Path | None
    seed: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what its folder says beside the weights.

    `revision` tells the weights apart in prefix hashes and in the names of cache tiers: equal for
    equal files, other for another config (overrides too), other headers or other sampled data.
    `extras`: stored tensors that are not used, each with the reason.
    """

    model: SparseMlaModel
    config: ModelConfig
    generation_defaults: GenerationDefaults
    folder: Path | None
    revision: str
    label: str
    dtype: torch.dtype
    extras: tuple[Extra, ...]


def parse_model_spec(
    spec: str | Path | None,
    *,
    overrides: Mapping[str, object] | None = None,
    default_vocab_size: int | None = None,
    default_seed: int = 0,
) -> ModelSource:
    """Check what the user named. `overrides` are config fields, for either kind of model.

    `default_vocab_size` is for a random model that does not state its own: it fits the tokenizer.
    """
    text = "" if spec is None else str(spec)
    if not text.startswith(RANDOM_PREFIX):
        folder = _existing_folder(spec)
        config = read_config(folder, overrides)
        return ModelSource(folder.resolve().name, config, folder, default_seed)
    _, fields, seed = parse_random_spec(text)
    shape, fits_tokenizer = random_shape(text)
    if default_vocab_size is not None and fits_tokenizer:
        fields = {"vocab_size": default_vocab_size, **fields}
    config = read_config(shape, {**fields, **(overrides or {})})
    return ModelSource(text, config, None, default_seed if seed is None else seed)


def open_model(
    source: ModelSource | str | Path | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: ProgressCallback | None = None,
    num_positions: int | None = None,
    has_fp8: bool = False,
) -> LoadedModel:
    """Load or draw the weights and build the model. `dtype` None: the one the config names.

    `num_positions` bounds the tables of rotary angles (None: the config's context). `has_fp8`:
    linear layers that are FP8 stay so (quantised.keeps_fp8 tells where that can be).
    """
    if not isinstance(source, ModelSource):
        source = parse_model_spec(source)
    config = source.config
    dtype = dtype or config.torch_dtype
    extras: tuple[Extra, ...] = ()
    if source.folder is None:
        params = random_weights(config, source.seed, dtype, device, has_fp8)
        revision = _digest(repr(config).encode(), str(source.seed).encode())
        defaults = GenerationDefaults(config.eos_token_ids)
    else:
        defaults = read_generation_defaults(source.folder, config)
        checkpoint = read_checkpoint(source.folder)
        plan = plan_load(checkpoint, config)
        extras = plan.extras
        revision = _checkpoint_revision(checkpoint, config)
        logger.info("Loading %s (%s), revision %s", source.folder, config.model_type, revision)
        for line in extras_summary(extras):
            logger.info("%s", line)
        params = load_planned(plan, dtype, device, progress, has_fp8)
    return LoadedModel(
        model=build_model(config, params, num_positions),
        config=config,
        generation_defaults=defaults,
        folder=source.folder,
        revision=revision,
        label=source.label,
        dtype=dtype,
        extras=extras,
    )


def _existing_folder(spec: str | Path | None) -> Path:
    folder, text = folder_of(spec), str(spec)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"Model '{text}' is a file. Give the folder that it is in. {NEEDS_FILES}")
    parts = text.split("/")
    looks_like_hub_id = len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~")
    what = (
        "looks like a hub id, and gnomon downloads nothing" if looks_like_hub_id else "is no folder"
    )
    raise ConfigError(
        f"Model '{text}' {what}. Give the path of a folder with the model's files, or "
        f"{RANDOM_EXAMPLE} for random weights, or no model for the small built-in one. "
        f"{NEEDS_FILES}"
    )


def _checkpoint_revision(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """A digest of the config as used, and of each file's size, header and samples of its data."""
    parts = [repr(config).encode()]
    starts = {path: path.stat().st_size for path in checkpoint.shards}
    for tensor in checkpoint.tensors.values():
        starts[tensor.path] = min(starts[tensor.path], tensor.start)
    for path, start in starts.items():
        size = path.stat().st_size
        parts.append(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            parts.append(file.read(start))
            for place in (start, (start + size) // 2, max(start, size - SAMPLE_BYTES)):
                file.seek(place)
                parts.append(file.read(SAMPLE_BYTES))
    return _digest(*parts)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]
