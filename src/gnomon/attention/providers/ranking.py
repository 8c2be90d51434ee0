"""Which provider is fastest where: measured orders of providers, as data.

In:  an operator and a need (phase, layout, heads). Out: names from the fastest on and the source;
     nothing where nobody has measured: then the providers' own ranks decide.
A measurement holds for a GPU generation, an operator, a phase and a layout. Among measurements of
several head counts the nearest one (by ratio) decides, so that 20 heads follow 16 rather than 64;
then likewise the nearest number of rows (`row_classes`; by_rows.py binds a kernel for each).
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
    """Providers from the fastest on. ``layout`` None: any.

    ``num_heads``: of what the op works on; of a mixture its experts. ``capability``: major compute
    capability of the GPU that it was measured on. ``num_rows``: of a call; 0: it does not matter.
    """

    op: str
    phase: str
    layout: str | None
    num_heads: int
    order: tuple[str, ...]
    source: str
    capability: int = 9
    num_rows: int = 0


_COMPILED = "DeepGEMM compiles for seconds at each new class of shapes; it can be forced"
_PRODUCTS = (
    "DeepGEMM is 1.5 times as fast on an H200 (bench/tune_moe.py), in blocks of 2048 rows: one "
    "compiled kernel"
)
_FEW = (
    "within 2 % of DeepGEMM or faster on an H200 (gnomon bench ops), but for up of dense layers; "
    "DeepGEMM compiles for seconds at each new class of rows; it can be forced"
)
_EXPERTS = (
    "DeepGEMM is up to 1.37 times as fast on an H200 (gnomon bench ops), in chunks of 8192 sorted "
    "rows: one compiled kernel a weight"
)
_MANY = "FA3's adapter makes a dozen launches a call; it can be forced"
_TUNED = "fastest on an H200 (bench/tune_attention.py)"
_H200 = "fastest on an H200 (docs/results/h200_ops.json)"

_BF16, _FP8, _INDEX = "bf16_576", "fp8_ds_mla_656", "index_k_132"
_TRITON, _FLASHMLA = ("triton", "flashmla"), ("flashmla", "triton")
_FA3, _FA3_FLASHMLA = ("fa3", "triton", "flashmla"), ("fa3", "flashmla", "triton")
_FLASHMLA_FA3, _TRITON_FA3 = ("flashmla", "fa3", "triton"), ("triton", "fa3", "flashmla")


def _by_rows(
    layout: str, num_heads: int, orders: Mapping[int, tuple[str, ...]]
) -> tuple[Measured, ...]:
    """Decode of sparse_mla: an order for each number of rows."""
    return tuple(
        Measured("sparse_mla", "decode", layout, num_heads, order, _H200, num_rows=num_rows)
        for num_rows, order in orders.items()
    )


MEASURED: tuple[Measured, ...] = (
    Measured("sparse_mla", "prefill", _BF16, 128, _FA3_FLASHMLA, _H200),
    Measured("sparse_mla", "prefill", _BF16, 64, _FA3_FLASHMLA, _H200),
    Measured("sparse_mla", "prefill", _BF16, 32, _FLASHMLA, _TUNED),
    Measured("sparse_mla", "prefill", _BF16, 16, _TRITON_FA3, _TUNED),
    Measured("sparse_mla", "prefill", _FP8, 128, _FLASHMLA, _TUNED),
    Measured("sparse_mla", "decode", _BF16, 16, _TRITON_FA3, _H200),
    *_by_rows(_BF16, 64, {1: _TRITON_FA3, 16: _FA3, 64: _FA3_FLASHMLA, 128: _FLASHMLA_FA3}),
    *_by_rows(_BF16, 128, {1: _TRITON_FA3, 16: _FA3, 64: _FLASHMLA_FA3, 128: _FLASHMLA_FA3}),
    *_by_rows(_FP8, 16, {1: _TRITON, 16: _TRITON, 64: _FLASHMLA, 128: _FLASHMLA}),
    *_by_rows(_FP8, 64, {1: _TRITON, 16: _TRITON, 64: _FLASHMLA, 128: _FLASHMLA}),
    *_by_rows(_FP8, 128, {1: _TRITON, 16: _FLASHMLA, 64: _FLASHMLA, 128: _FLASHMLA}),
    Measured("dense_mha", "prefill", None, 128, ("triton", "fa3"), _MANY, num_rows=1024),
    Measured("dense_mha", "prefill", None, 128, ("fa3", "triton"), _H200, num_rows=4096),
    Measured("index_scores", "prefill", _INDEX, 64, ("deepgemm", "triton"), _H200),
    # Also in prefill: rows of requests that bring few, beside long prompts.
    Measured("index_scores_paged", "prefill", _INDEX, 64, ("triton", "deepgemm"), _H200),
    Measured("index_scores_paged", "decode", _INDEX, 64, ("triton", "deepgemm"), _H200),
    Measured("linear_fp8", "prefill", None, 1, ("triton", "deepgemm"), _COMPILED, num_rows=1024),
    Measured("linear_fp8", "prefill", None, 1, ("deepgemm", "triton"), _PRODUCTS, num_rows=4095),
    Measured("linear_fp8", "decode", None, 1, ("triton", "deepgemm"), _FEW),
    Measured("moe_fp8", "prefill", None, 32, ("triton", "deepgemm"), _COMPILED, num_rows=2048),
    Measured("moe_fp8", "prefill", None, 32, ("deepgemm", "triton"), _EXPERTS, num_rows=4096),
    # Many experts: a block of each is mostly padding.
    Measured("moe_fp8", "prefill", None, 256, ("triton", "deepgemm"), _H200),
    Measured("moe_fp8", "decode", None, 1, ("triton", "deepgemm"), _H200),
)


def fastest(
    op: str, need: OpNeed, table: Sequence[Measured] = MEASURED
) -> tuple[tuple[str, ...], str]:
    """(names from the fastest on, where that was measured); ((), "") where it was not.

    A need that does not tell its rows gets what holds for the most rows measured.
    """
    fitting = _fitting(op, need, table)
    if not fitting:
        return (), ""
    most = max(one.num_rows for one in fitting)
    rows = need.num_rows or most or 1
    best = min(fitting, key=lambda one: (_distance(one.num_rows or rows, rows), -one.num_rows))
    return best.order, best.source


def row_classes(op: str, need: OpNeed, table: Sequence[Measured] = MEASURED) -> tuple[int, ...]:
    """The numbers of rows for which ``op`` was measured under ``need``, ascending; () if open."""
    return tuple(sorted({one.num_rows for one in _fitting(op, need, table) if one.num_rows}))


def _fitting(op: str, need: OpNeed, table: Sequence[Measured]) -> list[Measured]:
    """Measurements of the nearest number of heads; several for several numbers of rows."""
    if need.capability is None or need.phase is None:
        return []
    fitting = [
        one
        for one in table
        if (one.op, one.phase, one.capability) == (op, need.phase, need.capability[0])
        and one.layout in (None, need.layout_of(op))
    ]
    heads = heads_of(op, need)
    nearest = min((_distance(one.num_heads, heads) for one in fitting), default=0.0)
    return [one for one in fitting if _distance(one.num_heads, heads) == nearest]


def heads_of(op: str, need: OpNeed) -> int:
    """The heads that an operator works on, of the indexer or of attention; of experts, how many.

    1 where that is not known.
    """
    if op in ("moe", "moe_fp8"):
        return need.num_experts or 1
    name = "index_num_heads" if op.startswith("index_") else "num_heads"
    return need.size(name) or 1


def table_of(rows: Iterable[Mapping[str, object]], source: str) -> tuple[Measured, ...]:
    """Measured orders out of rows with op, phase, layout, num_heads, num_rows, provider, us.

    Several shapes of one class count by the geometric mean of their times; a provider that lacks a
    shape which another has is not ranked in that class.
    """
    times: dict[tuple[str, str, str | None, int, int], dict[str, dict[str, float]]] = {}
    for row in rows:
        layout = row.get("layout")
        key = (
            str(row["op"]),
            str(row["phase"]),
            None if layout is None else str(layout),
            int(str(row["num_heads"])),
            int(str(row.get("num_rows", 0))),
        )
        shapes = times.setdefault(key, {}).setdefault(str(row["provider"]), {})
        shapes[str(row.get("shape", ""))] = float(str(row["us"]))
    found = []
    for (op, phase, layout, num_heads, num_rows), by_provider in sorted(
        times.items(), key=lambda item: (*map(str, item[0][:3]), *item[0][3:])
    ):
        every = set().union(*by_provider.values())
        complete = {name: held for name, held in by_provider.items() if set(held) == every}
        order = sorted(complete, key=lambda name: (_mean_log(complete[name].values()), name))
        one = Measured(op, phase, layout, num_heads, tuple(order), source, num_rows=num_rows)
        found.append(one)
    return tuple(found)


def _mean_log(times: Iterable[float]) -> float:
    logs = [math.log(time) for time in times]
    return sum(logs) / len(logs)


def _distance(a: int, b: int) -> float:
    return abs(math.log(a / b))
