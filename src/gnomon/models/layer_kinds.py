"""Layers of a model by kind: as few of them as launch every kernel that all of them launch.

In:  a model. Out: `thinned`, `attending`: models that share its weights, with some of its layers.
What a layer launches hangs on what its weights are (shapes, dtypes, strides, alignment), on its
settings, and on what the layer before left behind; not on where it stands. So `thinned` keeps every
pair of neighbours once, the first layer as the first, and one of the last one's kind as the last.
Attention alone hangs on its own layer: `attending` keeps the first layer of each kind.
What such a model computes means nothing. It is for compiling and warming up.
Not here: who rehearses with it (engine/warm_up.py, engine/graphs.py, engine/prefill_graphs.py).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from gnomon.models.sparse_mla_model import SparseMlaModel

PLACES = frozenset({"layer", "part"})  # fields that say where a layer stands
ALIGNMENT = 16  # bytes; kernels tell pointers apart by it


def thinned(model: SparseMlaModel) -> SparseMlaModel:
    """The same weights, fewer layers, for whole steps."""
    return _with_layers(model, kept([kind_of(layer) for layer in model.layers]))


def attending(model: SparseMlaModel) -> SparseMlaModel:
    """The same weights, fewer layers, for what runs from one layer's queries to its attention."""
    kinds = [kind_of((layer.attention, layer.indexer)) for layer in model.layers]
    return _with_layers(model, [kinds.index(kind) for kind in dict.fromkeys(kinds)])


def _with_layers(model: SparseMlaModel, numbers: Sequence[int]) -> SparseMlaModel:
    found = copy.copy(model)
    found.layers = tuple(model.layers[number] for number in numbers)
    return found


def kept(kinds: Sequence[Hashable]) -> list[int]:
    """Ascending places that between them have every pair of neighbours, next to each other."""
    seen: set[tuple[Hashable, Hashable]] = set()
    found: list[int] = []
    for number in range(len(kinds)):
        before = kinds[number - 1] if number else None
        if (before, kinds[number]) in seen:
            continue
        seen.add((before, kinds[number]))
        if number and found[-1] != number - 1 and kinds[found[-1]] != before:
            found.append(number - 1)
        found.append(number)
    if kinds and kinds[found[-1]] != kinds[-1]:
        found.append(len(kinds) - 1)
    return found


def kind_of(value: Any) -> Hashable:
    """What of a layer's weights and settings kernels can tell apart."""
    if isinstance(value, Tensor):
        is_aligned = value.data_ptr() % ALIGNMENT == 0
        return value.dtype, tuple(value.shape), value.stride(), is_aligned
    if is_dataclass(value):
        told = [field.name for field in fields(value) if field.name not in PLACES]
        return type(value), tuple((name, kind_of(getattr(value, name))) for name in told)
    if isinstance(value, tuple):
        return tuple(kind_of(one) for one in value)
    assert isinstance(value, Hashable)
    return value
