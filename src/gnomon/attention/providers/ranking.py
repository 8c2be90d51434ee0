"""Which provider is fastest where: measured orders of providers, as data.

In:  an operator and a need (phase, layout, heads). Out: names from the fastest on and the source;
     nothing where nobody has measured: then the providers' own ranks decide.
A measurement holds for a GPU generation, an operator, a phase and a layout. Among measurements of
several head counts the nearest one (by ratio) decides, so that 20 heads follow 16 rather than 64.
`tools/rank_providers.py` prints this table out of a results file of `gnomon bench ops`.
Not here: whether a provider can (requirement.py), the choice (dispatch.choose).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gnomon.attention.requirement import OpNeed


@dataclass(frozen=True, slots=True)
class Measured:
    """Providers from the fastest on. ``layout`` None: any; ``num_heads``: of what the op works on.

    ``capability``: major compute capability of the GPU that it was measured on.
    """

    op: str
    phase: str
    layout: str | None
    num_heads: int
    order: tuple[str, ...]
    source: str
    capability: int = 9


_PUBLISHED = "fastest by published figures (kernels.md §1.1, §1.10); not measured here yet"
_COMPILED = (
    "triton: DeepGEMM's nvcc stalls for seconds at each new class of shapes; forced, it runs"
)

MEASURED: tuple[Measured, ...] = (
    Measured("sparse_mla", "prefill", "bf16_576", 128, ("flashmla", "fa3"), _PUBLISHED),
    Measured("sparse_mla", "prefill", "bf16_576", 16, ("fa3", "flashmla"), _PUBLISHED),
    Measured("sparse_mla", "decode", "bf16_576", 128, ("fa3", "flashmla"), _PUBLISHED),
    Measured("linear_fp8", "prefill", None, 1, ("triton", "deepgemm"), _COMPILED),
    Measured("linear_fp8", "decode", None, 1, ("triton", "deepgemm"), _COMPILED),
    Measured("moe_fp8", "prefill", None, 1, ("triton", "deepgemm"), _COMPILED),
    Measured("moe_fp8", "decode", None, 1, ("triton", "deepgemm"), _COMPILED),
)


def fastest(
    op: str, need: OpNeed, table: Sequence[Measured] = MEASURED
) -> tuple[tuple[str, ...], str]:
    """(names from the fastest on, where that was measured); ((), "") where it was not."""
    if need.capability is None or need.phase is None:
        return (), ""
    fitting = [
        one
        for one in table
        if (one.op, one.phase, one.capability) == (op, need.phase, need.capability[0])
        and one.layout in (None, need.layout_of(op))
    ]
    if not fitting:
        return (), ""
    nearest = min(fitting, key=lambda one: _distance(one.num_heads, heads_of(op, need)))
    return nearest.order, nearest.source


def heads_of(op: str, need: OpNeed) -> int:
    """The heads that an operator works on, of the indexer or of attention; 1 where not known."""
    name = "index_num_heads" if op.startswith("index_") else "num_heads"
    return need.size(name) or 1


def table_of(rows: Iterable[Mapping[str, object]], source: str) -> tuple[Measured, ...]:
    """Measured orders out of rows with op, phase, layout, num_heads, provider, us (microseconds).

    Several shapes of one class count by the geometric mean of their times; a provider that lacks a
    shape which another has is not ranked in that class.
    """
    times: dict[tuple[str, str, str | None, int], dict[str, dict[str, float]]] = {}
    for row in rows:
        layout = row.get("layout")
        key = (
            str(row["op"]),
            str(row["phase"]),
            None if layout is None else str(layout),
            int(str(row["num_heads"])),
        )
        shapes = times.setdefault(key, {}).setdefault(str(row["provider"]), {})
        shapes[str(row.get("shape", ""))] = float(str(row["us"]))
    found = []
    for (op, phase, layout, num_heads), by_provider in sorted(
        times.items(), key=lambda item: tuple(map(str, item[0]))
    ):
        every = set().union(*by_provider.values())
        complete = {name: held for name, held in by_provider.items() if set(held) == every}
        order = sorted(complete, key=lambda name: (_mean_log(complete[name].values()), name))
        found.append(Measured(op, phase, layout, num_heads, tuple(order), source))
    return tuple(found)


def _mean_log(times: Iterable[float]) -> float:
    logs = [math.log(time) for time in times]
    return sum(logs) / len(logs)


def _distance(a: int, b: int) -> float:
    return abs(math.log(a / b))
