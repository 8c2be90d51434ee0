"""Match what a model needs with what a folder holds, before anything is allocated.

In:  a `Checkpoint` (names, dtypes, shapes, places) and a `ModelConfig`.
Out: a `LoadPlan`: every stored tensor either fills one place of one parameter, or is a known extra
     with its reason. `CheckpointError` lists every tensor that is missing, unexpected, misshapen or
     of a dtype that is not read, with what was expected and what was found.
Not here: file formats (checkpoint), bytes (loading).

Known extras: layers of the MTP head (told by their `eh_proj`), index weights of layers that share
another layer's selection, `rotary_emb.inv_freq` (computed here), a head that is tied.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import CheckpointError
from gnomon.models.checkpoint import Checkpoint, StoredTensor
from gnomon.models.config import BlockFp8, ModelConfig
from gnomon.models.params import ParamSpec, Source, hub_layer_prefix, param_specs
from gnomon.models.quantised import SCALE_SUFFIX, scale_shape

FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
MAX_SHOWN = 8
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")


@dataclass(frozen=True, slots=True)
class Fill:
    """One stored tensor (and its scales, if it is quantised) that goes to one place."""

    spec: ParamSpec
    source: Source
    stored: StoredTensor
    scales: StoredTensor | None


@dataclass(frozen=True, slots=True)
class Extra:
    """A stored tensor that is not loaded, and why that is right."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`fills` in the order of files and offsets: the disk is read forwards, once."""

    folder: Path
    config: ModelConfig
    specs: tuple[ParamSpec, ...]
    fills: tuple[Fill, ...]
    extras: tuple[Extra, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(_bytes(fill) for fill in self.fills)


def _bytes(fill: Fill) -> int:
    return fill.stored.num_bytes + (fill.scales.num_bytes if fill.scales else 0)


def plan_load(checkpoint: Checkpoint, config: ModelConfig) -> LoadPlan:
    """Match all names, or say everything that does not match in one `CheckpointError`."""
    specs = param_specs(config)
    left = dict(checkpoint.tensors)
    fills: list[Fill] = []
    problems: list[str] = []
    for spec in specs:
        for source in _chosen_sources(spec, checkpoint):
            stored = left.pop(source.key, None)
            if stored is None:
                problems.append(_problem(source, "nothing"))
                continue
            scales = left.pop(source.key + SCALE_SUFFIX, None) if _is_fp8(stored) else None
            problems.extend(_misfits(source, stored, scales, config.quantization))
            fills.append(Fill(spec, source, stored, scales))
    extras, unexpected = _sort_leftovers(left, config)
    problems.extend(unexpected)
    if problems:
        raise CheckpointError(_report(checkpoint, problems))
    fills.sort(key=lambda fill: (fill.stored.path.name, fill.stored.start))
    return LoadPlan(checkpoint.folder, config, specs, tuple(fills), extras)


def extras_summary(extras: tuple[Extra, ...]) -> list[str]:
    """A line per reason: how many tensors are left out and the first of their names."""
    counts = Counter(extra.reason for extra in extras)
    first = {extra.reason: extra.key for extra in reversed(extras)}
    return [f"{count} tensors not loaded: {why} ({first[why]})" for why, count in counts.items()]


def _chosen_sources(spec: ParamSpec, checkpoint: Checkpoint) -> tuple[Source, ...]:
    """The stacked spelling where the folder has it, else one tensor per expert."""
    if spec.stacked is not None and spec.stacked.key in checkpoint.tensors:
        return (spec.stacked,)
    return spec.sources


def _is_fp8(stored: StoredTensor) -> bool:
    return stored.dtype == "F8_E4M3"


def _misfits(
    source: Source, stored: StoredTensor, scales: StoredTensor | None, block: BlockFp8 | None
) -> Iterator[str]:
    """What is wrong with a tensor that is there."""
    found = _describe(stored)
    if stored.shape != source.shape:
        yield _problem(source, found)
    if not _is_fp8(stored):
        if stored.dtype not in FLOAT_DTYPES:
            readable = " or ".join((*FLOAT_DTYPES, "F8_E4M3 with scales"))
            yield f"{source.key}: expected dtype {readable}, found {found}"
        return
    if block is None or len(stored.shape) < 2:
        why = "no quantization_config in config.json" if block is None else "a vector"
        yield f"{source.key}: expected dtype {' or '.join(FLOAT_DTYPES)} ({why}), found {found}"
        return
    wanted = Source(source.key + SCALE_SUFFIX, scale_shape(source.shape, block), ())
    if scales is None:
        yield _problem(wanted, "nothing")
    elif scales.shape != wanted.shape or scales.dtype not in SCALE_DTYPES:
        dtypes = " or ".join(SCALE_DTYPES)
        yield f"{wanted.key}: expected {dtypes} {[*wanted.shape]}, found {_describe(scales)}"


def _sort_leftovers(
    left: dict[str, StoredTensor], config: ModelConfig
) -> tuple[tuple[Extra, ...], list[str]]:
    """Known extras with their reasons, and complaints about all others."""
    extras: list[Extra] = []
    unexpected: list[str] = []
    for key, stored in left.items():
        reason = _known_extra(key, left, config)
        if reason is None:
            layers = f"expected no such tensor in {config.num_hidden_layers} layers"
            unexpected.append(f"{key}: {layers}, found {_describe(stored)}")
        else:
            extras.append(Extra(key, reason))
    return tuple(extras), unexpected


def _known_extra(key: str, left: dict[str, StoredTensor], config: ModelConfig) -> str | None:
    if key.endswith("rotary_emb.inv_freq"):
        return "rotary frequencies are computed from the config"
    if key == "lm_head.weight" and config.tie_word_embeddings:
        return "the head is tied to the embedding"
    match = LAYER.fullmatch(key)
    if match is None:
        return None
    layer = int(match[1])
    if layer >= config.num_hidden_layers:
        is_mtp = f"{hub_layer_prefix(layer)}eh_proj.weight" in left
        return f"layer {layer} is an MTP layer, which is not used yet" if is_mtp else None
    if match[2].startswith("self_attn.indexer.") and not config.has_indexer(layer):
        return "the layer shares another layer's selection"
    return None


def _describe(stored: StoredTensor) -> str:
    return f"{stored.dtype} {[*stored.shape]} in {stored.path.name}"


def _problem(source: Source, found: str) -> str:
    return f"{source.key}: expected shape {[*source.shape]}, found {found}"


def _report(checkpoint: Checkpoint, problems: list[str]) -> str:
    shown = "\n  ".join(problems[:MAX_SHOWN])
    more = len(problems) - MAX_SHOWN
    rest = f"\n  and {more} more" if more > 0 else ""
    return (
        f"The tensors in {checkpoint.folder} do not fit its config.json ({len(problems)} "
        f"problems); nothing was loaded:\n  {shown}{rest}\n"
        "Use the config.json and the weights of one and the same checkpoint."
    )
