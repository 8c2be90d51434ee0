"""Write a model as a checkpoint folder, with the names that the hub uses.

In:  a `ModelConfig`, parameters by their engine names, and how to store them.
Out: config.json, generation_config.json, model.safetensors or shards with their index. Reading the
     folder gives the same config (but for dtype and quantisation, which say how it is stored) and,
     where nothing was rounded, the same parameters to the bit.
Not here: tokenizer files; whoever writes a folder that is to be served copies them into it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.models.checkpoint import INDEX_NAME, SINGLE_NAME
from gnomon.models.config import BlockFp8, ModelConfig
from gnomon.models.config_writing import config_to_json
from gnomon.models.params import ParamSpec, Source, param_specs
from gnomon.models.quantised import SCALE_SUFFIX, quantise_blocks

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
# The published FP8 files quantise the big matrices and these two of the indexer.
FP8_PARTS = ("attn.", "mlp.", "experts.", "shared.", "indexer.wq_b.", "indexer.wk.")


@dataclass(frozen=True, slots=True)
class _Form:
    """The wishes of `save_checkpoint`."""

    num_shards: int
    dtype: torch.dtype | None
    fp8: BlockFp8 | None
    is_stacked: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stored tensor to be: a place in a parameter and its name there."""

    spec: ParamSpec
    source: Source


def save_checkpoint(
    folder: Path | str,
    config: ModelConfig,
    params: Mapping[str, Tensor],
    *,
    shards: int = 1,
    dtype: torch.dtype | None = None,
    fp8: BlockFp8 | None = None,
    stacked: bool = False,
) -> None:
    """Write the folder.

    `dtype`: None stores each parameter in its own; the router's bias stays float32 in any case.
    `fp8`: block FP8 for the matrices that published files quantise. `stacked`: all experts of a
    layer in one tensor, the other spelling of the names (params.py).
    `ConfigError` if the folder already holds weights or if parameters are missing.
    """
    if shards < 1:
        raise ConfigError(f"shards is {shards}; allowed: a whole number from 1 on.")
    form = _Form(shards, dtype, fp8, stacked)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} already holds *.safetensors files; choose an empty folder.")
    specs = param_specs(config)
    missing = [spec.name for spec in specs if spec.name not in params]
    if missing:
        raise ConfigError(f"Parameter '{missing[0]}' is missing ({len(missing)} in all).")
    values = config_to_json(config, dtype=dtype or params["embed.weight"].dtype, fp8=fp8)
    _write_json(folder / "config.json", values)
    generation = {name: values[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", generation)
    weight_map: dict[str, str] = {}
    for name, pieces in _shards(specs, form):
        tensors = {key: part for piece in pieces for key, part in _store(piece, params, form)}
        _write_safetensors(folder / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
    if shards > 1:
        _write_json(folder / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})


def _shards(specs: tuple[ParamSpec, ...], form: _Form) -> Iterator[tuple[str, list[_Piece]]]:
    """File names with their tensors, about equally many elements in each file."""
    pieces = [
        _Piece(spec, source)
        for spec in specs
        for source in ((spec.stacked,) if form.is_stacked and spec.stacked else spec.sources)
    ]
    sizes = [torch.Size(piece.source.shape).numel() for piece in pieces]
    total, num_shards = sum(sizes), form.num_shards
    if num_shards == 1:
        yield SINGLE_NAME, pieces
        return
    files: list[list[_Piece]] = [[] for _ in range(num_shards)]
    before = 0
    for piece, size in zip(pieces, sizes, strict=True):
        files[before * num_shards // total].append(piece)
        before += size
    for number, members in enumerate(files, start=1):
        yield f"model-{number:05d}-of-{num_shards:05d}.safetensors", members


def _store(
    piece: _Piece, params: Mapping[str, Tensor], form: _Form
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of a piece: itself, or codes and scales."""
    name, key = piece.spec.name, piece.source.key
    part = params[name].detach()[piece.source.index].cpu()
    if form.fp8 is not None and part.dim() > 1 and _is_quantised(name):
        codes, scales = quantise_blocks(part, form.fp8)
        yield key, codes
        yield key + SCALE_SUFFIX, scales
    elif name.endswith("router.bias"):
        yield key, part.to(torch.float32)
    else:
        yield key, part if form.dtype is None else part.to(form.dtype)


def _is_quantised(name: str) -> bool:
    inner = name.split(".", 2)[-1]
    return name.startswith("layers.") and inner.startswith(FP8_PARTS)


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # data begins at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
