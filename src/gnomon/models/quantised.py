"""Block FP8 weights: codes and scales to values and back, and which weights stay codes.

In:  codes float8_e4m3fn [..., R, C] and scales [..., ceil(R / rows), ceil(C / columns)]; or values.
Out: values = code × scale of its block, where blocks at the edges are cut off, not padded; or codes
     (rounded to nearest even) and scales = largest magnitude / 448, raised to a power of two where
     the format says so.
     `keeps_fp8` (of a wish, a format and a device), `why_kept`, `may_stay_fp8` (of one parameter).
Maths: oracle_math §2.3, §4.1. transformers' own dequantiser derives the block from the shapes and
     is wrong for edge blocks (§3.6); it is no oracle here.
Not here: FP8 arithmetic, activations, cache formats (attention/layouts).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import GROUP
from gnomon.attention.layouts.float8 import E4M3_MAX, ceil_power_of_two
from gnomon.errors import ConfigError
from gnomon.models.config import BlockFp8
from gnomon.models.params import ParamSpec, Region

SCALE_SUFFIX = "_scale_inv"  # behind the weight's whole name: X.weight_scale_inv
FP8_CAPABILITY = (8, 9)  # of GPUs that multiply FP8: weights stay FP8 there unasked
# Layers that multiply rows; kv_b is not among them: absorption needs its parts as plain numbers.
LINEAR_LAYERS = (
    "attn.q_a.", "attn.q_b.", "attn.kv_a.", "attn.o.", "indexer.wq_b.", "indexer.wk.", "mlp.",
    "shared.", "experts.",
)  # fmt: skip


def keeps_fp8(
    wish: str, block: BlockFp8 | None, device: str, capability: tuple[int, int] | None
) -> bool:
    """Whether codes of FP8 weights stay codes. `wish`: "auto", "fp8", "dequantise".

    "auto" keeps them on GPUs that multiply FP8 (sm_89 and newer). ConfigError if they are to be
    kept and the model has none, or has them in blocks that no kernel reads.
    """
    is_readable = block is not None and (block.block_rows, block.block_columns) == (GROUP, GROUP)
    if wish == "fp8" and not is_readable:
        found = "it has none" if block is None else f"{block.block_rows} x {block.block_columns}"
        raise ConfigError(
            f"weights='fp8' needs a model with FP8 weights in blocks of {GROUP} x {GROUP}, and "
            f"{found}. Use weights='auto'."
        )
    if wish != "auto":
        return wish == "fp8"
    return is_readable and device == "cuda" and (capability or (0, 0)) >= FP8_CAPABILITY


def why_kept(
    is_kept: bool, block: BlockFp8, device: str, capability: tuple[int, int] | None
) -> str:
    """Why weights="auto" keeps the codes or does not."""
    if is_kept:
        return "this GPU multiplies FP8"
    if device != "cuda":
        return "a CPU multiplies no FP8"
    if (block.block_rows, block.block_columns) != (GROUP, GROUP):
        return f"no kernel multiplies blocks of {block.block_rows} x {block.block_columns}"
    major, minor = capability or (0, 0)
    return f"compute capability {major}.{minor}; unasked they stay FP8 from 8.9 on"


def may_stay_fp8(spec: ParamSpec) -> bool:
    """Whether a parameter is a linear layer all of whose parts begin at whole blocks.

    Experts need whole groups of hidden columns in both of their matrices.
    """
    if len(spec.shape) < 2 or not any(f".{name}" in spec.name for name in LINEAR_LAYERS):
        return False
    if spec.name.endswith("experts.down") and spec.shape[-1] % GROUP:
        return False
    places = [place for source in spec.sources for place in source.index]
    return not any(isinstance(place, slice) and (place.start or 0) % GROUP for place in places)


def scale_region(region: Region) -> Region:
    """The place among the scales of what fills `region` of the codes."""
    return tuple(
        slice(place.start // GROUP, -(-place.stop // GROUP)) if isinstance(place, slice) else place
        for place in region
    )


def scale_shape(shape: tuple[int, ...], block: BlockFp8) -> tuple[int, ...]:
    """Shape of the scales of a tensor [..., R, C]: one per started block."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // block.block_rows), -(-columns // block.block_columns))


def dequantise_blocks(
    codes: Tensor, scales: Tensor, block: BlockFp8, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values [..., R, C] in `dtype` (float32 or float64: one product, rounded once)."""
    # A table look-up gives the same values as a cast of float8 and is three times as fast on a CPU.
    every = torch.arange(256, dtype=torch.uint8, device=codes.device)
    table = every.view(torch.float8_e4m3fn).to(dtype)
    numbers = codes.contiguous().view(torch.uint8).view(-1).to(torch.int32)
    values = torch.index_select(table, 0, numbers).view(codes.shape)
    for part, scale in _parts(values, scales.to(dtype), block):
        part.mul_(scale)
    return values


def quantise_blocks(values: Tensor, block: BlockFp8) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales of values [..., R, C]. A block of zeros gets the scale 1."""
    values = values.to(torch.float32, copy=True)
    rows, columns = values.shape[-2:]
    pad = (0, -columns % block.block_columns, 0, -rows % block.block_rows)
    grid = scale_shape(values.shape, block)
    tiles = torch.nn.functional.pad(values.abs(), pad).view(
        *grid[:-1], block.block_rows, grid[-1], block.block_columns
    )
    scales = tiles.amax(dim=(-3, -1)) / E4M3_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    if block.has_power_of_two_scales:
        scales = ceil_power_of_two(scales)
    for part, scale in _parts(values, scales, block):
        part.div_(scale)
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def _parts(values: Tensor, scales: Tensor, block: BlockFp8) -> Iterator[tuple[Tensor, Tensor]]:
    """Views that cover `values` [..., R, C], each with scales that broadcast over it.

    Whole blocks of columns are one view [..., R, blocks, columns]; columns that are left over are
    another one. Nothing of the size of `values` is allocated.
    """
    of_rows = scales.repeat_interleave(block.block_rows, dim=-2)[..., : values.shape[-2], :]
    whole = values.shape[-1] // block.block_columns
    edge = whole * block.block_columns
    if whole:
        shape = (*values.shape[:-1], whole, block.block_columns)
        yield values[..., :edge].view(shape), of_rows[..., :whole, None]
    if edge < values.shape[-1]:
        yield values[..., edge:], of_rows[..., whole:]
