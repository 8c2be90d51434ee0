"""A kernel chosen by the number of rows of a call, where the fastest one depends on it.

In:  an operator, a need, providers, the numbers of rows that were measured (providers/ranking.py).
Out: a Choice and one kernel that hands each call on, by the rows of its first argument (of moe_fp8
     its codes): a shape, known to the host, fixed in a captured graph.
A fusion comes from one provider: those that stand for an operator by rows are unbound
(engine/operators.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gnomon.attention.dispatch import Choice, OpNeed, Provider, Ranking, choose
from gnomon.attention.ops.attend import values_of

Kernel = Callable[..., Any]
OPERATORS_BY_ROWS = ("sparse_mla", "dense_mha", "linear_fp8", "moe_fp8")


@dataclass(frozen=True, slots=True)
class ByRows:
    """``kernels``: (most rows, kernel), ascending; the last one takes all that is left."""

    kernels: tuple[tuple[int, Kernel], ...]

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel for the rows of the first argument."""
        first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
        return self._kernel(first.shape[0])(*arguments)

    def values(self, *arguments: Any) -> Any:
        """Of sparse_mla: ``out`` alone (ops/attend.py)."""
        return values_of(self._kernel(arguments[0].shape[0]))(*arguments)

    def _kernel(self, num_rows: int) -> Kernel:
        return next((one for most, one in self.kernels if num_rows <= most), self.kernels[-1][1])


def choose_by_rows(
    op: str,
    need: OpNeed,
    available: Sequence[Provider],
    ranking: Ranking,
    classes: Sequence[int],
) -> tuple[Choice, Kernel] | None:
    """The choice for ``classes`` of rows, and its kernel; None where one provider takes all."""
    choices = [choose(op, replace(need, num_rows=n), available, None, ranking) for n in classes]
    if len({choice.provider.name for choice in choices}) < 2:
        return None
    parts: list[tuple[int, Choice]] = []
    for index, (num_rows, choice) in enumerate(zip(classes, choices, strict=True)):
        last = index + 1 == len(classes)
        most = num_rows if last else math.isqrt(num_rows * classes[index + 1])
        if parts and parts[-1][1].provider is choice.provider:
            parts.pop()
        parts.append((most, choice))
    limits = [f"up to {most} rows {one.provider.name}" for most, one in parts[:-1]]
    words = ", ".join([*limits, f"then {parts[-1][1].provider.name}"])
    main = parts[-1][1]
    kernels = tuple((most, one.provider.kernel(op, need)) for most, one in parts)
    return replace(main, reason=f"{words}: {main.reason}"), ByRows(kernels)
