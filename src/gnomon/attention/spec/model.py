"""What an operator's specification is: one value that tests, verify, bench and docs all read.

In:  nothing. Out: the types of a spec, of its cases, of its tolerances and of a check's result.
A spec's ``reference`` is the definition of the operator; a kernel is right if, for every case, what
it returns or writes stays within the tolerance of the reference computed in float64.
Not here: the specs themselves (norms.py, cache.py, index.py, attention.py, moe.py), the comparison
(check.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.routes import AttentionDims

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed |difference|: ``absolute`` + ``relative`` · |expected|; 0 and 0 mean equal."""

    absolute: float
    relative: float
    reason: str


EXACT = Tolerance(0.0, 0.0, "a choice or a copy: there is nothing to round")


@dataclass(frozen=True, slots=True)
class Argument:
    """One positional argument of a kernel: its axes in the words of design.md §2."""

    name: str
    axes: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes to draw a case at. The defaults are small enough for the reference's loops."""

    num_rows: int = 19
    num_keys: int = 70
    page_size: int = 4
    dims: AttentionDims = field(
        default_factory=lambda: AttentionDims(
            num_heads=4,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            index_topk=12,
            index_num_heads=16,
            index_head_dim=16,
        )
    )
    hidden_size: int = 32
    num_experts: int = 6
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 24


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of one call, and what is special about them."""

    label: str
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The contract of one operator.

    ``cases(generator, dtype, scale)`` yields a typical case first, then the edge cases; same
    generator state, same cases. ``observe(arguments, result)`` names every tensor that a call
    returned or wrote. ``tolerances`` by compute dtype; names in ``exact`` must be equal.
    ``flops`` counts a multiply-add as two; ``min_bytes`` counts each operand and result once.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    constraints: tuple[str, ...]
    reference: Callable[..., Any]
    cases: Callable[[torch.Generator, torch.dtype, Scale], Iterator[Case]]
    observe: Callable[[Arguments, Any], Mapping[str, Tensor]]
    tolerances: Mapping[torch.dtype, Tolerance]
    flops: Callable[[Arguments], int]
    min_bytes: Callable[[Arguments], int]
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SpecResult:
    """One kernel on one case: ``worst`` |difference|, its share of what is allowed, and where."""

    op: str
    provider: str
    case: str
    worst: float
    share: float
    where: str
    is_ok: bool


def num_bytes(*values: Any) -> int:
    """Bytes of all tensors among ``values``."""
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


def by_dtype(fp32: Tolerance, half: Tolerance) -> dict[torch.dtype, Tolerance]:
    """Tolerances of all compute dtypes; fp64 is fp32's, scaled by the ratio of their epsilons."""
    shrink = 2.0**-26  # leaves float64 some room above 2**-29 for longer sums
    fp64 = Tolerance(fp32.absolute * shrink, fp32.relative * shrink, fp32.reason)
    return {
        torch.float64: fp64,
        torch.float32: fp32,
        torch.bfloat16: half,
        torch.float16: half,
    }


ROUND_ONCE = Tolerance(1e-5, 2.0**-8, "fp32 inside, one rounding to bf16 (half an ulp is 2^-9)")
UNIT_SUM = Tolerance(1e-5, 1e-5, "fp32 sums of unit scale, any order (oracle_math.md §4.3)")
