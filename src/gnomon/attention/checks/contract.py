"""What a call of each operator returns, and which rows of it take part in nothing.

In:  the arguments of a call, and which of its rows are live where the caller knows.
Out: names, shapes and dtypes of its results; the mask of silent rows: padding, rows without keys,
rows that write nothing. Also the convention for kernels that write into given memory: a kernel
with a keyword ``out`` takes its results preallocated, one tensor or a tuple in the order below.
Not here: rules about values (rules.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import num_groups
from gnomon.attention.spec.model import Arguments


@dataclass(frozen=True, slots=True)
class Output:
    """One result. ``quiet``: what silent rows hold, None if nothing is said.

    ``is_finite``: every number of a live row has to be finite.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    quiet: float | None = None
    is_finite: bool = True


Outputs = tuple[Output, ...]
Silent = Callable[[Arguments, Tensor | None], Tensor | None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and lse: fp64 for fp64, else fp32."""
    return dtype if dtype == torch.float64 else torch.float32


def like_first(arguments: Arguments) -> Outputs:
    """Norms and rotations: the shape and dtype of x; padding rows hold anything."""
    return (Output("out", tuple(arguments[0].shape), arguments[0].dtype),)


def nothing(_: Arguments) -> Outputs:
    """Writers give back nothing."""
    return ()


def prepared(arguments: Arguments) -> Outputs:
    """index_prepare: the index queries."""
    return (Output("query", tuple(arguments[0].shape), arguments[0].dtype),)


def scores(arguments: Arguments) -> Outputs:
    """index_scores: a column for every key."""
    q, _, keys = arguments[:3]
    shape = (int(q.shape[0]), int(keys.shape[0]))
    return (Output("scores", shape, wide(q.dtype), -math.inf, is_finite=False),)


def paged_scores(arguments: Arguments) -> Outputs:
    """index_scores_paged: a column for every entry of a row's pages."""
    q, _, pool, pages = arguments[:4]
    shape = (int(q.shape[0]), int(pages.shape[1]) * pool.page_size)
    return (Output("scores", shape, wide(q.dtype), -math.inf, is_finite=False),)


def chosen(arguments: Arguments) -> Outputs:
    """topk: ids, counts, flags, and margins where they are asked for."""
    values, _, k, want_margin = arguments
    num_rows = int(values.shape[0])
    found = (
        Output("ids", (num_rows, k), torch.int32, -1.0),
        Output("count", (num_rows,), torch.int32, 0.0),
        Output("nan_rows", (num_rows,), torch.bool, 0.0),
    )
    if not want_margin:
        return found
    return (*found, Output("margin", (num_rows,), values.dtype, math.inf, is_finite=False))


def attended(arguments: Arguments) -> Outputs:
    """sparse_mla: out like the query, lse per head."""
    q = arguments[0]
    return (
        Output("out", tuple(q.shape), q.dtype, 0.0),
        Output("lse", tuple(q.shape[:2]), wide(q.dtype), -math.inf),
    )


def attended_densely(arguments: Arguments) -> Outputs:
    """dense_mha: the values' width."""
    q, _, v = arguments[:3]
    return (
        Output("out", (*q.shape[:2], int(v.shape[2])), q.dtype, 0.0),
        Output("lse", tuple(q.shape[:2]), wide(q.dtype), -math.inf),
    )


def merged(arguments: Arguments) -> Outputs:
    """lse_merge: like its first part; the lse of two empty parts is −inf."""
    out, lse = arguments[:2]
    return (
        Output("out", tuple(out.shape), out.dtype),
        Output("lse", tuple(lse.shape), lse.dtype, is_finite=False),
    )


def gathered(arguments: Arguments) -> Outputs:
    """context_gather: entries in the layout's computed dtype."""
    layout, length = arguments[0].layout, arguments[3]
    return (Output("out", (length, layout.dim), layout.computed_dtype),)


def mixed(arguments: Arguments) -> Outputs:
    """moe: like x; a row without experts gets 0."""
    return (Output("out", tuple(arguments[0].shape), arguments[0].dtype, 0.0),)


def quantised(arguments: Arguments) -> Outputs:
    """quantise_rows: codes like x, a scale per group of columns."""
    return _codes(*arguments[0].shape)


def quantised_half(arguments: Arguments) -> Outputs:
    """silu_quantise: half as many columns as hidden has."""
    num_rows, width = arguments[0].shape
    return _codes(num_rows, width // 2)


def _codes(num_rows: int, width: int) -> Outputs:
    return (
        Output("codes", (num_rows, width), torch.float8_e4m3fn, is_finite=False),
        Output("scales", (num_rows, num_groups(width)), torch.float32),
    )


def product_fp8(arguments: Arguments) -> Outputs:
    """linear_fp8: a column for every row of the weight."""
    shape = (int(arguments[0].shape[0]), int(arguments[2].shape[0]))
    return (Output("out", shape, arguments[4]),)


def mixed_fp8(arguments: Arguments) -> Outputs:
    """moe_fp8: as wide as the second weight; a row without experts gets 0."""
    shape = (int(arguments[0][0].shape[0]), int(arguments[4][0].shape[1]))
    return (Output("out", shape, arguments[6], 0.0),)


def padding(_: Arguments, live: Tensor | None) -> Tensor | None:
    """Silent rows of row-wise operators: the axis' padding, where it is known."""
    return None if live is None else ~live


def without(place: int) -> Silent:
    """Silent rows of operators with a count: those of count 0 (argument ``place``)."""

    def silent(arguments: Arguments, live: Tensor | None) -> Tensor:
        empty: Tensor = arguments[place] == 0
        return empty

    return silent


def without_slot(arguments: Arguments, live: Tensor | None) -> Tensor:
    """Silent rows of writers: slot −1."""
    unwritten: Tensor = arguments[5] < 0
    return unwritten


def without_expert(arguments: Arguments, live: Tensor | None) -> Tensor:
    """Silent rows of the experts: those that name none."""
    idle: Tensor = (arguments[1] < 0).all(1)
    return idle


def none_silent(_: Arguments, live: Tensor | None) -> None:
    """No row is known to be silent."""
