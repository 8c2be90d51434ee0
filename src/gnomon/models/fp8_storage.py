"""Memory of FP8 weights: experts and the shared expert behind them as one block of experts.

In:  the parameters that stay FP8. Out: `empty_codes`: uninitialised codes and scales by name; a
     shared expert as wide as the routed ones lies in memory as one more of them. `joined`: both as
     one weight [E + 1, N, K], where they do, so that a row's shared expert is one more expert of
     its list; nothing is copied.
Not here: values (loading, random_model), lists of experts (feed_forward).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.models.config import BlockFp8
from gnomon.models.params import ParamSpec
from gnomon.models.quantised import scale_shape


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
    return weights


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


def _empty(shape: tuple[int, ...], block: BlockFp8, device: torch.device | str) -> BlockFp8Weight:
    return BlockFp8Weight(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(scale_shape(shape, block), dtype=torch.float32, device=device),
        block.has_power_of_two_scales,
    )
