"""Memory of FP8 weights: those that are read together lie one behind the other.

In:  the parameters that stay FP8. Out: `empty_codes`: uninitialised codes and scales by name; a
     shared expert as wide as the routed ones lies in memory as one more of them, and layers of one
     input lie behind each other (SAME_INPUT). `stacked`: such layers as one weight; `joined`:
     experts and the shared one as one weight [E + 1, N, K], where they lie so, so that a row's
     shared expert is one more expert of its list. Nothing is copied.
Not here: values (loading, random_model), lists of experts (feed_forward).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.models.config import BlockFp8
from gnomon.models.params import ParamSpec
from gnomon.models.quantised import scale_shape

SAME_INPUT = (
    (".attn.q_b.weight", ".indexer.wq_b.weight"),
    (".attn.q_a.weight", ".indexer.wk.weight", ".attn.kv_a.weight"),
)
"""Layers of one input, in the order in which they lie; all but the last are of whole blocks."""

Shape = tuple[int, ...]


def empty_codes(
    specs: Iterable[ParamSpec], block: BlockFp8, device: torch.device | str
) -> dict[str, BlockFp8Weight]:
    """Codes and scales of every spec."""
    shapes = {spec.name: spec.shape for spec in specs}
    weights: dict[str, BlockFp8Weight] = {}
    for group in SAME_INPUT:
        for name in shapes:
            if name.endswith(group[0]):
                names = [name.removesuffix(group[0]) + suffix for suffix in group]
                weights |= _beside(names, shapes, block, device)
    for name, shape in shapes.items():
        layer, is_expert, matrix = name.partition(".experts.")
        shared = f"{layer}.shared.{matrix}.weight"
        if is_expert and shapes.get(shared) == shape[1:]:
            both = _empty((shape[0] + 1, *shape[1:]), block, device)
            weights[name] = part(both, slice(0, shape[0]))
            weights[shared] = part(both, shape[0])
        elif name not in weights:
            weights[name] = _empty(shape, block, device)
    return weights


def _beside(
    names: list[str], shapes: Mapping[str, Shape], block: BlockFp8, device: torch.device | str
) -> dict[str, BlockFp8Weight]:
    """Those of ``names`` that are there and may lie so; none if the first may not."""
    last = names[-1]
    found = [
        name
        for name in names
        if name in shapes and (name == last or shapes[name][0] % block.block_rows == 0)
    ]
    if found[:1] != names[:1]:
        return {}
    height = sum(shapes[name][0] for name in found)
    whole, weights, start = _empty((height, shapes[names[0]][1]), block, device), {}, 0
    for name in found:
        stop = start + shapes[name][0]
        weights[name] = _rows(whole, slice(start, stop), block.block_rows)
        start = stop
    return weights


def stacked(first: BlockFp8Weight, second: BlockFp8Weight) -> BlockFp8Weight | None:
    """[N1 + N2, ...] of weights [N1, ...] and [N2, ...]; None where the second lies elsewhere."""
    codes = _as_one(first.codes, second.codes)
    scales = _as_one(first.scales, second.scales)
    if codes is None or scales is None:
        return None
    return BlockFp8Weight(codes, scales, first.is_power_of_two)


def joined(experts: BlockFp8Weight, shared: BlockFp8Weight) -> BlockFp8Weight | None:
    """[E + 1, N, K], the shared expert last; None where it does not lie behind the others."""
    return stacked(experts, part(shared, None))


def _as_one(one: Tensor, other: Tensor) -> Tensor | None:
    is_behind = (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and other.storage_offset() == one.storage_offset() + one.numel()
        and one.shape[1:] == other.shape[1:]
        and one.is_contiguous()
        and other.is_contiguous()
    )
    if not is_behind:
        return None
    shape = (one.shape[0] + other.shape[0], *one.shape[1:])
    return one.as_strided(shape, one.stride(), one.storage_offset())


def part(weight: BlockFp8Weight, place: int | slice | None) -> BlockFp8Weight:
    """Some experts, or one, of a weight of many; None: one matrix as many. A view."""
    return BlockFp8Weight(weight.codes[place], weight.scales[place], weight.is_power_of_two)


def _rows(weight: BlockFp8Weight, rows: slice, block_rows: int) -> BlockFp8Weight:
    """Rows of a matrix that begin at a whole block: a view."""
    blocks = slice(rows.start // block_rows, -(-rows.stop // block_rows))
    return BlockFp8Weight(weight.codes[rows], weight.scales[blocks], weight.is_power_of_two)


def _empty(shape: tuple[int, ...], block: BlockFp8, device: torch.device | str) -> BlockFp8Weight:
    return BlockFp8Weight(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(scale_shape(shape, block), dtype=torch.float32, device=device),
        block.has_power_of_two_scales,
    )
