"""Specs of the row-wise operators: rms_norm, layer_norm, rope. Maths: oracle_math.md §1.1–1.5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from gnomon.attention.providers import reference
from gnomon.attention.spec.draw import normal, rope_rows
from gnomon.attention.spec.model import (
    ROUND_ONCE,
    Argument,
    Arguments,
    Case,
    OpSpec,
    Scale,
    Tolerance,
    by_dtype,
    num_bytes,
)

NORM = Tolerance(2e-6, 2e-6, "fp32: one reduction over the row, then three roundings")
_SHAPES = "[..., D]"


def _inputs(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[tuple[str, Tensor]]:
    width = scale.hidden_size
    x = normal(generator, (scale.num_rows, width), dtype)
    yield "typical", x
    yield "one row", x[:1]
    yield "heads", normal(generator, (3, 5, 8), dtype)
    yield "no rows", x[:0]
    yield "rows of zeros and of eps size", torch.stack((x[0] * 0, x[1] * 1e-3, x[2] * 1e3))


def _rms_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    for label, x in _inputs(generator, dtype, scale):
        weight = normal(generator, (x.shape[-1],), dtype)
        for eps in (1e-6, 1e-5):
            yield Case(f"{label}, eps {eps}", (x, weight, eps))


def _layer_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    for label, x in _inputs(generator, dtype, scale):
        weight, bias = (normal(generator, (x.shape[-1],), dtype) for _ in range(2))
        # A mean well away from zero, but no larger than the row: its size is the row's precision.
        yield Case(label, (x + x.abs().amax(-1, keepdim=True) / 2, weight, bias, 1e-6))


def _rope_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    dim, heads = scale.dims.qk_rope_head_dim, scale.dims.num_heads
    positions = [7 * row for row in range(scale.num_rows)]
    positions[2] = -1  # a padding row in the middle
    for is_interleaved in (True, False):
        kind = "interleaved" if is_interleaved else "half-split"
        rows = rope_rows(positions, dim, is_interleaved)
        x = normal(generator, (scale.num_rows, heads, dim), dtype)
        yield Case(f"{kind}, heads", (x, rows))
        yield Case(f"{kind}, one head", (x[:, 0].contiguous(), rows))
        yield Case(
            f"{kind}, a slice",
            (normal(generator, (*x.shape[:2], 16 + 3 * dim), dtype)[..., 16:], rows),
        )
        odd = normal(generator, (*x.shape[:2], 17 + dim), dtype)[..., 17:]
        yield Case(f"{kind}, a slice of rows of odd width", (odd, rows))
        yield Case(
            f"{kind}, first columns", (normal(generator, (*x.shape[:2], 3 * dim), dtype), rows)
        )
        far = rope_rows([30000, 0], dim, is_interleaved)
        yield Case(f"{kind}, far", (x[:2], far))
        yield Case(f"{kind}, no rows", (x[:0], rope_rows([], dim, is_interleaved)))


def _observe(_: Arguments, result: Any) -> Mapping[str, Tensor]:
    return {"out": result}


def _bytes(arguments: Arguments) -> int:
    return num_bytes(*arguments) + num_bytes(arguments[0])


RMS_NORM = OpSpec(
    name="rms_norm",
    summary="x * rsqrt(mean(x²) + eps) * weight over the last dim",
    arguments=(
        Argument("x", _SHAPES, "any float"),
        Argument("weight", "[D]", "any float"),
        Argument("eps", "", "float"),
    ),
    constraints=("half dtypes are computed in fp32 and rounded once",),
    reference=reference.rms_norm,
    cases=_rms_cases,
    observe=_observe,
    tolerances=by_dtype(NORM, ROUND_ONCE),
    flops=lambda arguments: 4 * int(arguments[0].numel()),
    min_bytes=_bytes,
)

LAYER_NORM = OpSpec(
    name="layer_norm",
    summary="(x − mean) * rsqrt(var + eps) * weight + bias over the last dim",
    arguments=(
        Argument("x", _SHAPES, "any float"),
        Argument("weight", "[D]", "any float"),
        Argument("bias", "[D]", "any float"),
        Argument("eps", "", "float"),
    ),
    constraints=("var is the mean squared deviation", "half dtypes are rounded once"),
    reference=reference.layer_norm,
    cases=_layer_cases,
    observe=_observe,
    tolerances=by_dtype(
        Tolerance(5e-6, 5e-6, "fp32: mean and variance, then four roundings"), ROUND_ONCE
    ),
    flops=lambda arguments: 7 * int(arguments[0].numel()),
    min_bytes=_bytes,
)

ROPE = OpSpec(
    name="rope",
    summary="rotate column pairs by the angle of each row's position",
    arguments=(
        Argument("x", "[R, ..., D]", "any float"),
        Argument("rows", "R rotations over the first dim <= D columns", "fp32"),
    ),
    constraints=(
        "dim is even",
        "columns from dim on pass through",
        "rotated in fp32, rounded once",
    ),
    reference=reference.rope,
    cases=_rope_cases,
    observe=_observe,
    tolerances=by_dtype(Tolerance(1e-6, 1e-6, "fp32: two products and a sum"), ROUND_ONCE),
    flops=lambda arguments: 3 * int(arguments[0].numel()),
    min_bytes=_bytes,
)

SPECS = (RMS_NORM, LAYER_NORM, ROPE)
