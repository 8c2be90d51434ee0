"""Linear layers whose weights may have stayed in FP8, and rows that several of them read.

In:  parameters by name (a Tensor, or a BlockFp8Weight where the checkpoint's codes were kept).
Out: `Linear`: called with rows and the bound operators, it multiplies; FP8 weights take rows
     quantised per 128 columns (W8A8), other weights take the rows as they are.
     `SharedInput`: rows that are quantised at most once, however many products read them.
     `WideLinear`: products whose results stay in float32.
`stacked`: matrices over the same input as one, where they lie so (one launch instead of several).
Not here: which weights stay in FP8 (loading.py), the products (operators).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention import block_fp8
from gnomon.attention.block_fp8 import BlockFp8Weight, Fp8Rows
from gnomon.attention.ops.fusions import linear_parts
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import Summands
from gnomon.models import fp8_storage

Param = Tensor | BlockFp8Weight


class SharedInput:
    """Rows [R, K] and, once an FP8 product has read them, their codes and scales.

    ``made``: products of these rows that somebody made already, by layer.
    """

    __slots__ = ("_ops", "_quantised", "made", "values")

    def __init__(self, values: Tensor, ops: Operators, quantised: Fp8Rows | None = None) -> None:
        """``quantised``: where an operator gave both at once."""
        self.values = values
        self.made: dict[Linear, Tensor] = {}
        self._ops = ops
        self._quantised = quantised

    def quantised(self, is_power_of_two: bool) -> Fp8Rows:
        """Codes and scales; all weights of a model have scales of the same kind."""
        if self._quantised is None:
            self._quantised = self._ops.quantise_rows(self.values, is_power_of_two)
        return self._quantised


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """x -> x · weightᵀ; weight [N, K]."""

    weight: Param

    @classmethod
    def of(cls, params: Mapping[str, Param], name: str) -> Linear:
        """The layer ``{name}.weight``."""
        return cls(params[f"{name}.weight"])

    @property
    def num_outputs(self) -> int:
        """N."""
        return int(self.weight.shape[0])

    def __call__(self, x: Tensor | SharedInput | Fp8Rows, ops: Operators) -> Tensor:
        """[R, N] of x [R, K], in x's dtype. Rows that are FP8 already need an FP8 weight."""
        if isinstance(x, SharedInput) and self in x.made:
            return x.made[self]
        if isinstance(self.weight, Tensor):
            assert not isinstance(x, Fp8Rows)
            return ops.linear(x.values if isinstance(x, SharedInput) else x, self.weight)
        return ops.linear_fp8(_in_fp8(x, self.weight, ops), self.weight)

    def unsummed(self, x: Tensor | SharedInput | Fp8Rows, ops: Operators) -> Tensor | Summands:
        """The same for a norm that reads it: its sum over splits of K may be left to that."""
        if isinstance(self.weight, Tensor):
            return self(x, ops)
        return linear_parts(ops, _in_fp8(x, self.weight, ops), self.weight)


def _in_fp8(x: Tensor | SharedInput | Fp8Rows, weight: BlockFp8Weight, ops: Operators) -> Fp8Rows:
    if isinstance(x, Tensor):
        return ops.quantise_rows(x, weight.is_power_of_two)
    return x.quantised(weight.is_power_of_two) if isinstance(x, SharedInput) else x


@dataclass(frozen=True, slots=True, eq=False)
class WideLinear:
    """x -> x · weightᵀ in fp32 (fp64): routers and index head weights, which choices hang on.

    ``parts`` [P * N, K]: on a GPU, matrices of the model's dtype whose sum is the weight, one below
    the other. Products of rows in that dtype are exact then, and tensor cores make them; only
    their sums are fp32.
    """

    weight: Tensor  # [N, K] float32 (float64)
    parts: Tensor | None

    @classmethod
    def of(cls, params: Mapping[str, Param], name: str, dtype: torch.dtype) -> WideLinear:
        """The layer ``{name}.weight`` of a model of ``dtype``."""
        weight = tensor(params, f"{name}.weight")
        if weight.device.type != "cuda" or dtype == weight.dtype:
            return cls(weight, None)
        parts = exact_parts(weight, dtype)
        return cls(weight, None if parts is None else parts.flatten(0, 1))

    def __call__(self, x: Tensor, ops: Operators) -> Tensor:
        """[R, N] float32 (float64) of x [R, K]."""
        if self.parts is None or x.dtype != self.parts.dtype:
            return ops.linear(x.to(self.weight.dtype), self.weight)
        products = ops.linear(x, self.parts, torch.float32)
        num_outputs = self.weight.shape[0]
        if products.shape[1] == num_outputs:
            return products
        by_part = products.view(x.shape[0], -1, num_outputs)
        if not ops.products.is_fixed:
            return by_part.sum(1)  # one launch, in an order that torch chooses by the rows
        first, second, *third = by_part.unbind(1)
        return first + second if not third else first + second + third[0]


def exact_parts(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Up to three matrices [P, N, K] of ``dtype`` whose sum is ``weight``, each the nearest to what
    is left; None where three do not reach it. fp32 in bf16 takes three at most.
    """
    rest, parts = weight, []
    for _ in range(3):
        part = rest.to(dtype)
        parts.append(part)
        rest = rest - part.to(weight.dtype)
        if not bool(rest.any()):
            return torch.stack(parts)
    return None


def scale_kind(weight: Param) -> bool | None:
    """What rows are quantised with for ``weight``: is_power_of_two; None if they are not."""
    return weight.is_power_of_two if isinstance(weight, BlockFp8Weight) else None


def stacked(first: Linear, *others: Linear) -> Linear | None:
    """One layer whose outputs are those of all in turn, where their FP8 weights lie so.

    Nothing is copied.
    """
    whole = first.weight
    for other in others:
        if isinstance(whole, Tensor) or isinstance(other.weight, Tensor):
            return None
        both = fp8_storage.stacked(whole, other.weight)
        if both is None:
            return None
        whole = both
    return Linear(whole)


def tensor(params: Mapping[str, Param], name: str) -> Tensor:
    """A parameter that is never FP8: norms, biases, embeddings, routers."""
    value = params[name]
    assert isinstance(value, Tensor), name
    return value


def dequantised(value: Param, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] as plain numbers of ``dtype``; a Tensor is returned as it is."""
    if isinstance(value, Tensor):
        return value
    compute = torch.promote_types(dtype, torch.float32)
    return block_fp8.dequantised(value.codes, value.scales, compute).to(dtype)
