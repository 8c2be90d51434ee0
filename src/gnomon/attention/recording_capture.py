"""Capture: keeps the operator calls of one step while the step runs.

In:  operators to wrap, the step's geometry and plan, limits.
Out: `wrapped(ops)`, operators that compute the same and keep each call; `calls`, all kept so far.
Inputs are copied before the kernel runs, results after it; weights are kept by reference, since
nobody writes them. Memory: at most ``total_bytes``, beyond which only the fact of a call is kept;
a call that passes ``call_bytes`` is kept with fewer of its rows.
A fault of the capture itself never reaches the step: the call is then kept without its data.
Not here: which steps are captured (engine/record.py, engine/shadow.py), files.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry
from gnomon.attention.ops.operators import Kernel, Operators
from gnomon.attention.ops.products import Products
from gnomon.attention.ops.values import RopeRows
from gnomon.attention.plan import StepPlan
from gnomon.attention.recording import RecordedCall, pool_part, value_bytes
from gnomon.attention.recording_calls import (
    EXPERT_IDS,
    EXPERTS,
    SHAPES,
    Arguments,
    cut_rows,
    most_entries,
    num_rows,
    observed,
    touched_slots,
)
from gnomon.attention.recording_rows import RowPlaces

logger = logging.getLogger(__name__)

WIDEST_GAP = 64  # a tensor that spreads over more times its own size is kept without its strides
WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "rms_norm": (1,),
    "layer_norm": (1, 2),
    "latent_write": (1,),
    "moe": EXPERTS,  # a file keeps those that are named (recording_header.py)
}


@dataclass(frozen=True, slots=True)
class Limits:
    """``num_rows``: most rows of a call, evenly spread, None for all; bytes of a call, of all."""

    num_rows: int | None = None
    call_bytes: int = 256 << 20
    total_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class _Begun:
    """A call whose arguments are kept and whose results are still to come."""

    call: RecordedCall
    picked: Mapping[str, Tensor] | None  # rows by group; None: all of them
    num_bytes: int = 0


class Capture:
    """One step's calls (module docstring). ``parts``: names of the pools, by id(pool)."""

    def __init__(
        self, geometry: Geometry, plan: StepPlan, parts: Mapping[int, str], limits: Limits
    ) -> None:
        self.calls: list[RecordedCall] = []
        self._places = RowPlaces(geometry, plan)
        self._parts = parts
        self._limits = limits
        self._layer: int | None = None
        self._num_bytes = 0
        self._copies: dict[int, tuple[Any, Any]] = {}  # id -> (original, copy): rotations

    def wrapped(self, ops: Operators) -> Operators:
        """Operators that compute as ``ops`` do and keep every call here.

        Products with FP8 weights are not kept: their arguments are the model.
        """
        kernels = {
            op: self._wrap(op, kernel) if op in SHAPES else kernel
            for op, kernel in ops.kernels.items()
        }
        return _CapturingOperators(kernels, self, ops.products)

    def begin_layer(self, layer: int) -> None:
        """The model begins a layer."""
        self._layer = layer
        self._places.begin_layer()

    def _wrap(self, op: str, kernel: Kernel) -> Kernel:
        @functools.wraps(kernel)
        def recorded(*arguments: Any, **keywords: Any) -> Any:
            begun = self._guarded(op, lambda: self._begin(op, arguments))
            try:
                result = kernel(*arguments, **keywords)
            except Exception as error:
                self.calls.append(_failed(begun.call, f"{type(error).__name__}: {error}"))
                raise
            ended = self._guarded(op, lambda: self._end(begun, arguments, result))
            self.calls.append(ended.call)
            self._num_bytes += ended.num_bytes
            return result

        return recorded

    def _guarded(self, op: str, work: Callable[[], _Begun]) -> _Begun:
        """``work()``; whatever it raises must not become the step's fault."""
        try:
            return work()
        except Exception as error:
            logger.warning("a call of %s could not be recorded: %s", op, error)
            return _Begun(RecordedCall(op, self._layer, withheld=f"not recorded: {error}"), None)

    def _begin(self, op: str, arguments: Arguments) -> _Begun:
        shape = SHAPES[op]
        pool = None if shape.pool is None else arguments[shape.pool]
        places = self._places.of(op, arguments)
        call = RecordedCall(op, self._layer, self._parts.get(id(pool)))
        if self._num_bytes >= self._limits.total_bytes:
            return _Begun(call.without_data("the recording is full"), None)
        cut = self._cut(op, arguments)
        if cut is None:
            return _Begun(call.without_data("one row is larger than the limit of a call"), None)
        taken, picked, num_bytes = cut
        if shape.pool is not None:
            _, taken = pool_part(op, taken)
        weights = WEIGHTS.get(op, ())
        kept = tuple(
            value if at in weights else self._copied(value) for at, value in enumerate(taken)
        )
        rows = {
            group: step_rows if picked is None else step_rows[picked[group]]
            for group, step_rows in places.items()
        }
        begun = RecordedCall(op, self._layer, call.part, kept, None, rows)
        return _Begun(begun, picked, num_bytes)

    def _cut(
        self, op: str, arguments: Arguments
    ) -> tuple[Arguments, Mapping[str, Tensor] | None, int] | None:
        """(the call with as many rows as the limits allow, these rows or None for all, bytes).

        None if not even one row fits. Which rows stay depends on their number alone.
        """
        count = most = num_rows(op, arguments)
        if self._limits.num_rows is not None:
            count = min(count, self._limits.num_rows)
        while True:
            taken, picked = arguments, None
            if count < most:
                taken, picked = cut_rows(op, arguments, functools.partial(_spread, count))
            for count_bytes in (_most_bytes, _call_bytes):
                if (num_bytes := count_bytes(op, taken)) <= self._limits.call_bytes:
                    return taken, picked, num_bytes
            if count <= 1:
                return None
            count //= 2

    def _end(self, begun: _Begun, arguments: Arguments, result: Any) -> _Begun:
        call = begun.call
        if call.withheld:
            return begun
        found = observed(call.op, arguments, result)
        if call.op == "context_gather":
            found = {name: tensor[: call.arguments[3]] for name, tensor in found.items()}
        elif begun.picked is not None:
            group_of = SHAPES[call.op].group_of
            found = {
                name: tensor.index_select(0, begun.picked[group_of(name)].to(tensor.device))
                for name, tensor in found.items()
            }
        kept = {name: _on_host(tensor) for name, tensor in found.items()}
        ended = RecordedCall(call.op, call.layer, call.part, call.arguments, kept, call.rows)
        num_bytes = begun.num_bytes + sum(value_bytes(tensor) for tensor in kept.values())
        return _Begun(ended, begun.picked, num_bytes)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _on_host(value)
        if isinstance(value, tuple):
            return tuple(self._copied(one) for one in value)
        if not isinstance(value, RopeRows):
            return value
        if id(value) not in self._copies:
            copy = RopeRows(
                value.axis, _on_host(value.cos), _on_host(value.sin), value.is_interleaved
            )
            self._copies[id(value)] = (value, copy)
        return self._copies[id(value)][1]


class _CapturingOperators(Operators):
    """Operators whose kernels are captured; tells the capture where layers begin."""

    def __init__(self, kernels: Mapping[str, Kernel], capture: Capture, products: Products) -> None:
        super().__init__(kernels, products=products)
        self._capture = capture

    def begin_layer(self, layer: int) -> None:
        """The model begins a layer."""
        self._capture.begin_layer(layer)


def _failed(call: RecordedCall, error: str) -> RecordedCall:
    return RecordedCall(
        call.op, call.layer, call.part, call.arguments, None, call.rows, error, call.withheld
    )


def _spread(count: int, total: int) -> Tensor:
    """``count`` of ``total`` row numbers, evenly spread from the first on; at most all."""
    kept = min(count, total)
    return torch.arange(kept, dtype=torch.int64) * total // max(kept, 1)


def _most_bytes(op: str, arguments: Arguments) -> int:
    """At least as much as ``_call_bytes`` says, and cheaper to say."""
    total = _plain_bytes(op, arguments)
    place = SHAPES[op].pool
    if place is not None:
        total += arguments[place].layout.bytes_per_token * most_entries(op, arguments)
    if op == "moe":
        total += _expert_bytes(arguments, arguments[EXPERT_IDS].numel())
    return total


def _call_bytes(op: str, arguments: Arguments) -> int:
    """Bytes that keeping a call's arguments takes."""
    total = _plain_bytes(op, arguments)
    place = SHAPES[op].pool
    if place is not None:
        num_entries = int(touched_slots(op, arguments).shape[0])
        total += arguments[place].layout.bytes_per_token * num_entries
    if op == "moe":
        ids = arguments[EXPERT_IDS]
        total += _expert_bytes(arguments, ids[ids >= 0].unique().numel())
    return total


def _plain_bytes(op: str, arguments: Arguments) -> int:
    weights = WEIGHTS.get(op, ())
    return sum(value_bytes(value) for at, value in enumerate(arguments) if at not in weights)


def _expert_bytes(arguments: Arguments, num_experts: int) -> int:
    weights = [arguments[place] for place in EXPERTS]
    return sum(value_bytes(w[:1]) * min(num_experts, w.shape[0]) for w in weights)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU, with the gaps between its rows where it has some (NaN or 0 in them)."""
    source = tensor.detach()
    stride, size = source.stride(), source.shape
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    is_plain = source.is_contiguous() or source.numel() == 0
    if is_plain or 0 in stride or span > WIDEST_GAP * source.numel():
        return source.to("cpu", copy=True).contiguous()
    return with_stride(source.cpu(), stride)


def with_stride(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same numbers in a buffer of their own with the strides ``stride``."""
    span = 1 + sum((n - 1) * step for n, step in zip(values.shape, stride, strict=True))
    filler = torch.nan if values.is_floating_point() else 0
    buffer = torch.full((span,), filler, dtype=values.dtype)
    spread = buffer.as_strided(values.shape, stride)
    spread.copy_(values)
    return spread
