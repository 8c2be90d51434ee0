"""Choose a layout by name: the meaning of --kv-layout, and of vLLM's --kv-cache-dtype spellings.

In:  a name, the width of what is stored (`LatentDims` or `IndexKeyDims`), the model's dtype and the
     operations that the chosen providers need.
Out: the layout, reading in the model's dtype; or ConfigError that says what, got, allowed, next.
Names: "auto" and the dtype spellings give plain layouts; "fp8", "fp8_e4m3" and "fp8_ds_mla" give
     the packed FP8 layout of the part (latents: the 656-byte rule, with an empty rope slot for a
     NoPE model, as vLLM lays it out; index keys: index_k); any layout's own id names itself, if it
     fits the model. Spellings of vLLM that mean another format are refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from gnomon.attention.layouts.base import HOST_OPERATIONS, KVLayout, Operation
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import DTYPE_NAMES, PlainLayout
from gnomon.errors import ConfigError, LayoutError

DTYPE_SPELLINGS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
FP8_SPELLINGS = frozenset({"fp8", "fp8_e4m3", "fp8_ds_mla"})
FOREIGN_SPELLINGS = {
    "fp8_e5m2": "e5m2 keeps two mantissa bits and no reader here takes it",
    "fp8_inc": "it is one scale per tensor, for Gaudi",
    "fp8_per_token_head": "it scales per head; latents have none",
    "int8_per_token_head": "it scales per head; latents have none",
    "nvfp4": "no FP4 layout exists here",
    "nvfp4_ds_mla": "no FP4 layout exists here",
    "mxfp4": "no FP4 layout exists here",
}


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Widths of a latent cache entry, under the names of the model's config."""

    kv_lora_rank: int
    qk_rope_head_dim: int  # 0: NoPE


@dataclass(frozen=True, slots=True)
class IndexKeyDims:
    """Width of an index key, under the name of the model's config."""

    index_head_dim: int


def choose_layout(
    name: str,
    dims: LatentDims | IndexKeyDims,
    dtype: torch.dtype,
    operations: Collection[Operation] = HOST_OPERATIONS,
) -> KVLayout:
    """The layout that `name` means for a part of width `dims` in a model that computes in `dtype`.

    Raises ConfigError if the name is unknown or foreign, if the format cannot hold these widths, or
    if the layout lacks one of `operations`.
    """
    layout = _resolve(name, dims, dtype)
    lacking = sorted(set(operations) - layout.operations)
    if lacking:
        able = [
            other.id for other in candidates(dims, dtype) if set(operations) <= other.operations
        ]
        raise ConfigError(
            f"cache layout {layout.id} has no operation {', '.join(lacking)}, which the chosen "
            f"providers need. " + _advice(able)
        )
    return layout


def candidates(dims: LatentDims | IndexKeyDims, dtype: torch.dtype) -> tuple[KVLayout, ...]:
    """Every layout that can hold a part of width `dims`, each reading in `dtype`."""
    return tuple(layout.computing_in(dtype) for layout in _layouts(dims))


def _layouts(dims: LatentDims | IndexKeyDims) -> Iterator[KVLayout]:
    if isinstance(dims, LatentDims):
        num_columns = dims.kv_lora_rank + dims.qk_rope_head_dim
    else:
        num_columns = dims.index_head_dim
    for dtype in DTYPE_NAMES:
        yield PlainLayout(dtype, num_columns)
    for has_empty_slot in (True, False) if _is_nope(dims) else (False,):
        packed = _packed(dims, has_empty_slot)
        if isinstance(packed, KVLayout):
            yield packed


def _packed(dims: LatentDims | IndexKeyDims, has_empty_slot: bool) -> KVLayout | LayoutError:
    """The FP8 layout for `dims`, or the reason why there is none."""
    try:
        if isinstance(dims, IndexKeyDims):
            return Fp8IndexKeyLayout(dims.index_head_dim)
        return Fp8LatentLayout(dims.kv_lora_rank, dims.qk_rope_head_dim, has_empty_slot)
    except LayoutError as error:
        return error


def _is_nope(dims: LatentDims | IndexKeyDims) -> bool:
    return isinstance(dims, LatentDims) and dims.qk_rope_head_dim == 0


def _resolve(name: str, dims: LatentDims | IndexKeyDims, dtype: torch.dtype) -> KVLayout:
    known = candidates(dims, dtype)
    if name == "auto" or name in DTYPE_SPELLINGS:
        stored = dtype if name == "auto" else DTYPE_SPELLINGS[name]
        for layout in known:
            if isinstance(layout, PlainLayout) and layout.stored_dtype == stored:
                return layout
        raise ConfigError(f"no plain cache layout stores {stored}. " + _advice(_ids(known)))
    if name in FP8_SPELLINGS:
        packed = _packed(dims, has_empty_slot=_is_nope(dims))
        if isinstance(packed, LayoutError):
            raise ConfigError(f"cache layout {name!r} does not fit this model: {packed}")
        return packed.computing_in(dtype)
    for layout in known:
        if layout.id == name:
            return layout
    reason = FOREIGN_SPELLINGS.get(name, "no such layout fits this part of the model")
    spellings = ["auto", *DTYPE_SPELLINGS, *sorted(FP8_SPELLINGS)]
    raise ConfigError(
        f"cache layout {name!r} is not available: {reason}. Part: {dims}. "
        f"Allowed: {', '.join(spellings)}; or one of {', '.join(_ids(known))}."
    )


def _ids(layouts: Collection[KVLayout]) -> list[str]:
    return [layout.id for layout in layouts]


def _advice(able: list[str]) -> str:
    if able:
        return f"Layouts that have them here: {', '.join(able)}; choose one with --kv-layout."
    return "No layout of this part has them; choose another provider."
