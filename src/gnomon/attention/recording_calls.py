"""What recording has to know of each operator's arguments: which run over rows, which name slots.

In:  an operator's name and the arguments of one call (spec.SPECS[op].arguments, in that order).
Out: the entries of the pool that the call reads or writes; the same call with fewer rows; the
     names of what it returned.
Not here: copying (recording_capture.py), comparing (recording_compare.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.axes import take_axis
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import RopeRows
from gnomon.attention.spec import SPECS

Arguments = tuple[Any, ...]
PickRows = Callable[[int], Tensor]  # number of rows -> int64 row numbers to keep, ascending

WRITTEN = "written"  # the entries that a writer left in its slots
EXPERTS = (3, 4)  # moe's weights: only the experts that its rows name are kept
EXPERT_IDS = 1
NOT_KEPT = frozenset({"quantise_rows", "silu_quantise", "linear_fp8", "moe_fp8"})  # all weights


@dataclass(frozen=True, slots=True)
class CallShape:
    """How one operator's arguments hang on rows and pages.

    rows: argument -> its group of rows; arguments of one group have one line per row each.
    results: likewise by the name of a result ("*": all of them). pool: the pool argument; slots or
    pages: the argument that names its entries. heads: the operator's results have their heads in
    dim 1. width: of the argument whose last dim tells whether this is the hidden state.
    """

    rows: Mapping[int, str]
    results: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({"*": "R"}))
    pool: int | None = None
    slots: int | None = None
    pages: int | None = None
    is_writer: bool = False
    has_heads: bool = False

    def group_of(self, result: str) -> str:
        """The group of rows that a result runs over; "" for none."""
        return self.results.get(result, self.results.get("*", ""))


def _rows(*places: int) -> dict[int, str]:
    return dict.fromkeys(places, "R")


SHAPES: Mapping[str, CallShape] = MappingProxyType(
    {
        "rms_norm": CallShape(_rows(0)),
        "layer_norm": CallShape(_rows(0)),
        "rope": CallShape(_rows(0, 1), has_heads=True),
        "latent_write": CallShape(_rows(0, 3, 5), pool=4, slots=5, is_writer=True),
        "index_prepare": CallShape(
            {0: "R", 1: "N", 5: "N"},
            {"query": "R", WRITTEN: "N"},
            pool=4,
            slots=5,
            is_writer=True,
            has_heads=True,
        ),
        "index_scores": CallShape(_rows(0, 1, 3)),
        "index_scores_paged": CallShape(_rows(0, 1, 3, 4), pool=2, pages=3),
        "topk": CallShape(_rows(0, 1)),
        "sparse_mla": CallShape(_rows(0, 1, 3, 4), pool=2, slots=3, has_heads=True),
        "dense_mha": CallShape(_rows(0, 3), has_heads=True),
        "context_gather": CallShape({}, {"*": ""}, pool=0, pages=1),
        "lse_merge": CallShape(_rows(0, 1, 2, 3), has_heads=True),
        "moe": CallShape(_rows(0, 1, 2)),
    }
)


def num_rows(op: str, arguments: Arguments) -> int:
    """Rows of a call: of its largest group, or the entries that it gathers."""
    if op == "context_gather":
        return int(arguments[3])
    return max(int(_lines(arguments[place]).shape[0]) for place in SHAPES[op].rows)


def touched_slots(op: str, arguments: Arguments) -> Tensor:
    """Sorted int64 slots of the pool that a call reads or writes; without -1."""
    shape = SHAPES[op]
    assert shape.pool is not None
    size = arguments[shape.pool].page_size
    if shape.slots is not None:
        slots = arguments[shape.slots].reshape(-1).long()
        if op == "sparse_mla":
            width = arguments[3].shape[1]
            columns = torch.arange(width, device=slots.device)
            slots = slots[(columns < arguments[4][:, None]).reshape(-1)]
        return _distinct(slots[slots >= 0])
    if op == "context_gather":
        _, pages, start, length = arguments
        entries = torch.arange(start, start + length, device=pages.device)
        return _distinct(pages.long()[entries // size] * size + entries % size)
    pages, count = arguments[3].long(), arguments[4]
    entries = torch.arange(pages.shape[1] * size, device=pages.device)
    slots = pages[:, entries // size] * size + entries % size
    return _distinct(slots[entries < count[:, None]])


def cut_rows(op: str, arguments: Arguments, pick: PickRows) -> tuple[Arguments, dict[str, Tensor]]:
    """The same call over some of its rows, and which rows those are, by group."""
    if op == "context_gather":
        kept = pick(int(arguments[3]))
        return (*arguments[:3], int(kept.shape[0])), {}
    groups = SHAPES[op].rows
    picked: dict[str, Tensor] = {}
    for place, group in groups.items():
        if group not in picked:
            picked[group] = pick(int(_lines(arguments[place]).shape[0]))
    done: dict[int, Any] = {}  # rotations that are one value stay one value

    def taken(value: Any, group: str) -> Any:
        if id(value) not in done:
            done[id(value)] = _take(value, picked[group])
        return done[id(value)]

    cut = [
        taken(value, groups[place]) if place in groups else value
        for place, value in enumerate(arguments)
    ]
    if op == "index_prepare":
        cut[3] = (taken(arguments[3][0], "R"), taken(arguments[3][1], "N"))
    return tuple(cut), picked


def most_entries(op: str, arguments: Arguments) -> int:
    """At least as many as ``touched_slots`` has, without a look at the numbers."""
    shape = SHAPES[op]
    if op == "context_gather":
        return int(arguments[3])
    if shape.slots is not None:
        return int(arguments[shape.slots].numel())
    assert shape.pool is not None
    return int(arguments[3].numel()) * int(arguments[shape.pool].page_size)


def only_named_experts(arguments: Arguments) -> Arguments:
    """A call of moe with the weights of the experts that its rows name, renumbered; a copy."""
    ids = arguments[EXPERT_IDS]
    named = ids[ids >= 0].unique()
    numbers = torch.searchsorted(named, ids.clamp_min(0)).masked_fill_(ids < 0, -1)
    kept = list(arguments)
    kept[EXPERT_IDS] = numbers.to(ids.dtype)
    for place in EXPERTS:
        kept[place] = arguments[place].index_select(0, named).cpu()
    return tuple(kept)


def observed(op: str, arguments: Arguments, result: Any) -> dict[str, Tensor]:
    """What a call returned, by name, and, of a writer, the bytes that its slots hold now."""
    shape = SHAPES[op]
    if not shape.is_writer:
        found = SPECS[op].observe(arguments, result)
        return {name: tensor for name, tensor in found.items() if tensor is not None}
    assert shape.pool is not None
    assert shape.slots is not None
    pool: PagedPool = arguments[shape.pool]
    found = {WRITTEN: pool.layout.gather_bytes(pool, arguments[shape.slots])}
    return found if result is None else {"query": result, **found}


def _distinct(numbers: Tensor) -> Tensor:
    distinct: Tensor = torch.unique(numbers)
    return distinct


def _lines(value: Any) -> Tensor:
    lines: Tensor = value.cos if isinstance(value, RopeRows) else value
    return lines


def _take(value: Any, rows: Tensor) -> Any:
    if isinstance(value, RopeRows):
        axis = take_axis(value.axis, rows.cpu().numpy(), f"{value.axis.label} > recorded")
        at = rows.to(value.cos.device)
        return RopeRows(
            axis, value.cos.index_select(0, at), value.sin.index_select(0, at), value.is_interleaved
        )
    return value.index_select(0, rows.to(value.device))
