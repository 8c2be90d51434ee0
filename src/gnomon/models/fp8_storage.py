"""Memory of FP8 weights: those that are read together lie one behind the other.

In:  the parameters that stay FP8. Out: `empty_codes`: uninitialised codes and scales by name; a
     shared expert as wide as the routed ones lies in memory as one more of them, an indexer's
     queries behind those of attention, which have the same input. `joined`: experts and the shared
     one as one weight [E + 1, N, K], where they lie so, so that a row's shared expert is one more
     expert of its list. `stacked`: two matrices as one. Nothing is copied.
Not here: values (loading, random_model), lists of experts (feed_forward).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.models.config import BlockFp8
from gnomon.models.params import ParamSpec
from gnomon.models.quantised import scale_shape

SAME_INPUT = {".attn.q_b.weight": ".indexer.wq_b.weight"}


def empty_codes(
    specs: Iterable[ParamSpec], block: BlockFp8, device: torch.device | str
) -> dict[str, BlockFp8Weight]:
    """Codes and scales of every spec."""
    shapes = {spec.name: spec.shape for spec in specs}
    weights: dict[str, BlockFp8Weight] = {}
    for name, shape in shapes.items():
        layer, is_expert, matrix = name.partition(".experts.")
        shared = f"{layer}.shared.{matrix}.weight"
        if is_expert and shapes.get(shared) == shape[1:]:
            both = _empty((shape[0] + 1, *shape[1:]), block, device)
            weights[name] = part(both, slice(0, shape[0]))
            weights[shared] = part(both, shape[0])
        elif name not in weights:
            weights[name] = _empty(shape, block, device)
    for first, second in SAME_INPUT.items():
        for name, shape in shapes.items():
            other = name.removesuffix(first) + second
            if name.endswith(first) and other in shapes and shape[0] % block.block_rows == 0:
                height = shape[0] + shapes[other][0]
                both = _empty((height, shape[1]), block, device)
                weights[name] = _rows(both, slice(0, shape[0]), block.block_rows)
                weights[other] = _rows(both, slice(shape[0], height), block.block_rows)
    return weights


def stacked(first: BlockFp8Weight, second: BlockFp8Weight) -> BlockFp8Weight | None:
    """[N1 + N2, K] of weights [N1, K] and [N2, K]; None where the second does not lie behind."""
    parts = []
    for one, other in ((first.codes, second.codes), (first.scales, second.scales)):
        is_behind = (
            one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            and other.storage_offset() == one.storage_offset() + one.numel()
            and one.shape[1:] == other.shape[1:]
            and one.is_contiguous()
            and other.is_contiguous()
        )
        if not is_behind:
            return None
        shape = (one.shape[0] + other.shape[0], one.shape[1])
        parts.append(one.as_strided(shape, one.stride(), one.storage_offset()))
    return BlockFp8Weight(parts[0], parts[1], first.is_power_of_two)


def joined(experts: BlockFp8Weight, shared: BlockFp8Weight) -> BlockFp8Weight | None:
    """[E + 1, N, K], the shared expert last; None where it does not lie behind the others."""
    parts = []
    for many, one in ((experts.codes, shared.codes), (experts.scales, shared.scales)):
        is_behind = (
            many.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
            and one.storage_offset() == many.storage_offset() + many.numel()
            and one.shape == many.shape[1:]
        )
        if not is_behind:
            return None
        shape = (many.shape[0] + 1, *one.shape)
        parts.append(many.as_strided(shape, many.stride(), many.storage_offset()))
    return BlockFp8Weight(parts[0], parts[1], experts.is_power_of_two)


def part(weight: BlockFp8Weight, place: int | slice) -> BlockFp8Weight:
    """Some experts, or one, of a weight of many: a view."""
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
