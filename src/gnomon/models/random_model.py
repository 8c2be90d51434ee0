"""Random weights for any shape: no file, no download, the same bits from the same seed.

In:  a `ModelConfig`, a seed, a dtype, a device.
Out: a tensor per parameter. Matrices N(0, 1 / fan-in), embedding N(0, 1), norm weights 1 + 0.1 N,
     index key bias 0.1 N, router correction bias 0.05 N (oracle_math §3.1): logits have a standard
     deviation near 1 and no part of the maths is switched off. transformers' own initialisation
     (std 0.02, biases 0, norms 1) hides faults and is not used.
     A model whose config has block FP8 gets the linear layers that are FP8 in published files
     (oracle_math §2.3) through FP8: as codes and scales (`random_weights` with `has_fp8`), or as
     the numbers that they stand for.
Not here: shapes (tiny_shapes, anchor_shapes), meaning: the text of such a model says nothing.

Each tensor has its own generator, seeded with (seed, name), and is drawn in float32: it does not
change when another layer is added, nor with the dtype but for its rounding. Tensors are drawn on
the CPU, so that every device gets the same, but for large ones of a GPU: those it draws itself,
part by part, in other bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.models.config import BlockFp8, ModelConfig
from gnomon.models.fp8_storage import empty_codes
from gnomon.models.linear import Param, tensor
from gnomon.models.params import ParamSpec, param_dtype, param_specs, with_tied_head
from gnomon.models.quantised import dequantise_blocks, may_stay_fp8, quantise_blocks

LARGE = 1 << 22  # numbers of a tensor that a GPU draws itself
ROWS_AT_ONCE = 8192  # a multiple of a block's rows
ALSO_FP8 = ".attn.kv_b."  # FP8 in files, though it is never multiplied so


def random_params(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Every parameter of the model by its engine name, in `dtype` unless it is kept in float32."""
    params = random_weights(config, seed, dtype, device)
    return {name: tensor(params, name) for name in params}


def random_weights(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    has_fp8: bool = False,
) -> dict[str, Param]:
    """The same; with `has_fp8` the layers that may stay FP8 are codes and scales."""
    specs, block = param_specs(config), config.quantization
    params: dict[str, Param] = {}
    if block is not None and has_fp8:
        kept = [spec for spec in specs if _is_quantised(spec) and may_stay_fp8(spec)]
        params |= empty_codes(kept, block, device)
    for spec in specs:
        parts, place = _parts(spec, seed, torch.device(device)), params.get(spec.name)
        if isinstance(place, BlockFp8Weight):
            assert block is not None
            _fill_codes(place, parts, block)
        else:
            through = block if _is_quantised(spec) else None
            params[spec.name] = _plain(spec, parts, through, (dtype, torch.device(device)))
    return with_tied_head(config, params)


def _is_quantised(spec: ParamSpec) -> bool:
    return may_stay_fp8(spec) or ALSO_FP8 in spec.name


def _plain(
    spec: ParamSpec,
    parts: Iterator[tuple[int | slice, Tensor]],
    block: BlockFp8 | None,
    kind: tuple[torch.dtype, torch.device],
) -> Tensor:
    dtype, device = kind
    out = torch.empty(spec.shape, dtype=param_dtype(spec, dtype), device=device)
    for place, values in parts:
        if block is not None:
            values = dequantise_blocks(*quantise_blocks(values, block), block)
        if len(spec.shape) > 1:
            values = values.to(dtype)  # also where it is kept in float32: as a file would hold it
        out[place].copy_(values)
    return out


def _fill_codes(
    weight: BlockFp8Weight, parts: Iterator[tuple[int | slice, Tensor]], block: BlockFp8
) -> None:
    for place, values in parts:
        codes, scales = quantise_blocks(values, block)
        weight.codes[place].copy_(codes)
        where = place
        if isinstance(place, slice) and place != slice(None):  # rows of a matrix: rows of blocks
            where = slice(place.start // block.block_rows, -(-place.stop // block.block_rows))
        weight.scales[where].copy_(scales)


def _parts(
    spec: ParamSpec, seed: int, device: torch.device
) -> Iterator[tuple[int | slice, Tensor]]:
    """(place, float32 values) of the whole tensor, or of one expert or some rows at a time."""
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    if device.type == "cpu" or math.prod(spec.shape) < LARGE:
        generator = torch.Generator().manual_seed(number)
        yield slice(None), _drawn(spec, spec.shape, generator).to(device)
        return
    generator = torch.Generator(device).manual_seed(number)
    if len(spec.shape) > 2:
        for expert in range(spec.shape[0]):
            yield expert, _drawn(spec, spec.shape[1:], generator)
        return
    for start in range(0, spec.shape[0], ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, spec.shape[0])
        yield slice(start, stop), _drawn(spec, (stop - start, *spec.shape[1:]), generator)


def _drawn(spec: ParamSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.empty(shape, dtype=torch.float32, device=generator.device)
    noise.normal_(generator=generator)
    name = spec.name
    if name == "embed.weight":
        return noise
    if name.endswith("norm.weight"):
        return noise.mul_(0.1).add_(1.0)
    if name.endswith("k_norm.bias"):
        return noise.mul_(0.1)
    if name.endswith("router.bias"):
        return noise.mul_(0.05)
    return noise.mul_(math.pow(spec.shape[-1], -0.5))
