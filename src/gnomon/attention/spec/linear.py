"""Specs of products with block FP8 weights, dense and by expert (oracle_math.md §4.1).

Codes are compared as numbers. Reference sums are float64; tensor cores of FP8 keep some 14 bits of
a sum inside 128 columns, so fp32 results get a tolerance of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from gnomon.attention.block_fp8 import GROUP, dequantised_rows, num_groups
from gnomon.attention.providers import reference
from gnomon.attention.spec.draw import expert_choices, normal
from gnomon.attention.spec.model import (
    Argument,
    Arguments,
    Case,
    OpSpec,
    Scale,
    Tolerance,
    by_dtype,
    num_bytes,
)

ONE_CODE = Tolerance(1e-3, 2.0**-3, "a code may be the next one: silu is not exact")
COARSE_SUM = Tolerance(4e-3, 2e-3, "FP8 tensor cores keep 14 bits of a sum (oracle_math.md §4.3)")
HALF_SUM = Tolerance(2.0**-6, 2.0**-7, "the same, and one rounding on either side")
MIXED = Tolerance(2.0**-5, 2.0**-7, "a hidden value next to a tie may get the next code")
HALF_MIXED = Tolerance(2.0**-4, 2.0**-6, "the same, and products in half precision")

FP8 = "float8_e4m3fn"


def _rows(
    generator: Generator, num_rows: int, width: int, is_power_of_two: bool
) -> tuple[Tensor, Tensor]:
    x = normal(generator, (num_rows, width), torch.float32)
    return reference.quantise_rows(x, is_power_of_two)


def _weight(generator: Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight of about unit gain."""
    *lead, rows, columns = shape
    codes = normal(generator, shape, torch.float32) * 100
    grid = (*lead, num_groups(rows), num_groups(columns))
    scales = 1 + torch.rand(grid, generator=generator)
    clamped = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
    return clamped, scales * columns**-0.5 / 150


def _quantise_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    for label, num_rows, width in _shapes(scale):
        for is_power_of_two in (False, True):
            x = normal(generator, (num_rows, width), dtype)
            kind = "powers of two" if is_power_of_two else "scales"
            yield Case(f"{label}, {kind}", (x, is_power_of_two))
    x = normal(generator, (6, 300), dtype)
    x[0], x[1], x[2, 130] = 0, x[1] * 1e-6, 3e4
    yield Case("zeros, tiny and far", (x, False))
    wide = normal(generator, (5, 2 * scale.hidden_size), dtype)
    yield Case("rows of a wider tensor", (wide[:, : scale.hidden_size], False))


def _shapes(scale: Scale) -> Iterator[tuple[str, int, int]]:
    yield "typical", scale.num_rows, scale.hidden_size
    yield "one row", 1, 256
    yield "an edge group", 5, 300
    yield "no rows", 0, scale.hidden_size


def _silu_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    for label, num_rows, width in _shapes(scale):
        hidden = normal(generator, (num_rows, 2 * width), dtype)
        yield Case(label, (hidden, False))
        yield Case(f"{label}, powers of two", (hidden, True))


def _linear_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    hidden = scale.hidden_size
    shapes = {
        "typical": (scale.num_rows, hidden, 2 * hidden),
        "one row": (1, 256, 384),
        "edge blocks": (7, 300, 200),
        "many rows": (150, 128, 130),
        "no rows": (0, hidden, hidden),
    }
    for label, (num_rows, width, columns) in shapes.items():
        x = _rows(generator, num_rows, width, is_power_of_two=False)
        yield Case(label, (*x, *_weight(generator, (columns, width)), dtype))


def _moe_cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    experts, hidden = scale.num_experts, scale.hidden_size
    width = num_groups(scale.moe_intermediate_size) * GROUP
    gate_up = _weight(generator, (experts, 2 * width, hidden))
    down = _weight(generator, (experts, hidden, width))
    for label, num_rows in {"typical": scale.num_rows, "one row": 1, "no rows": 0}.items():
        for is_power_of_two in (False, True):
            x = _rows(generator, num_rows, hidden, is_power_of_two)
            ids = expert_choices(generator, num_rows, experts, scale.num_experts_per_tok)
            weights = torch.rand(ids.shape, generator=generator).to(dtype)
            rest = (gate_up, down, is_power_of_two, dtype)
            kind = ", powers of two" if is_power_of_two else ""
            yield Case(label + kind, (x, ids, weights, *rest))
            holes = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1)
            yield Case(f"{label}{kind}, some −1", (x, holes, weights, *rest))
        yield Case(f"{label}, only −1", (x, ids * 0 - 1, weights, *rest))


def _codes(_: Arguments, result: Any) -> Mapping[str, Tensor]:
    codes, scales = result
    return {"codes": codes.to(torch.float32), "scales": scales}


def _values(_: Arguments, result: Any) -> Mapping[str, Tensor]:
    codes, scales = result
    return {"values": dequantised_rows(codes, scales, torch.float64)}


def _moe_flops(arguments: Arguments) -> int:
    _, ids, _, gate_up, down, *_ = arguments
    return 2 * int((ids >= 0).sum()) * int(gate_up[0][0].numel() + down[0][0].numel())


def _moe_bytes(arguments: Arguments) -> int:
    x, ids, weights, gate_up, down, _, dtype = arguments
    touched = int(ids[ids >= 0].unique().numel())
    expert = num_bytes(*(part[0] for part in (*gate_up, *down)))
    out = int(x[0].shape[0] * down[0].shape[1]) * int(dtype.itemsize)
    return num_bytes(*x, ids, weights) + touched * expert + out


def _linear_bytes(arguments: Arguments) -> int:
    x_codes, x_scales, codes, scales, dtype = arguments
    out = int(x_codes.shape[0] * codes.shape[0]) * int(dtype.itemsize)
    return num_bytes(x_codes, x_scales, codes, scales) + out


def _quantise_bytes(arguments: Arguments) -> int:
    x = arguments[0]
    return num_bytes(x) + int(x.numel() + x.shape[0] * num_groups(x.shape[1]) * 4)


def _silu_bytes(arguments: Arguments) -> int:
    x = arguments[0]
    return num_bytes(x) + int(x.numel() // 2 + x.shape[0] * num_groups(x.shape[1] // 2) * 4)


QUANTISE_ROWS = OpSpec(
    name="quantise_rows",
    summary="codes = x / scale in e4m3, scale = max(largest of 128 columns, 1e-4) / 448",
    arguments=(
        Argument("x", "[M, K]", "any float"),
        Argument("is_power_of_two", "", "bool"),
    ),
    constraints=(
        "float32 arithmetic with IEEE divisions: codes and scales are equal for every kernel",
        "powers of two: the scale is raised to the next one",
        "a number that is not finite gets the code 0x7f and has no part in the scale",
    ),
    reference=reference.quantise_rows,
    cases=_quantise_cases,
    observe=_codes,
    tolerances=by_dtype(ONE_CODE, ONE_CODE),
    flops=lambda arguments: int(arguments[0].numel()),
    min_bytes=_quantise_bytes,
    exact=frozenset({"codes", "scales"}),
)

SILU_QUANTISE = OpSpec(
    name="silu_quantise",
    summary="quantise_rows of silu(gate) · up",
    arguments=(
        Argument("hidden", "[M, 2 I], gate first", "any float"),
        Argument("is_power_of_two", "", "bool"),
    ),
    constraints=("silu(gate) · up is formed in fp32 and not rounded before it is quantised",),
    reference=reference.silu_quantise,
    cases=_silu_cases,
    observe=_values,
    tolerances=dict.fromkeys(by_dtype(ONE_CODE, ONE_CODE), ONE_CODE),
    flops=lambda arguments: 4 * int(arguments[0].numel()),
    min_bytes=_silu_bytes,
)

LINEAR_FP8 = OpSpec(
    name="linear_fp8",
    summary="[M, N] = Σ over groups of K of (Σ_k code · code) · row scale · block scale",
    arguments=(
        Argument("x_codes", "[M, K]", FP8),
        Argument("x_scales", "[M, ceil(K / 128)]", "float32"),
        Argument("codes", "[N, K]", FP8),
        Argument("scales", "[ceil(N / 128), ceil(K / 128)]", "float32"),
        Argument("dtype", "", "torch.dtype of the result"),
    ),
    constraints=(
        "edge blocks are cut off, not padded",
        "fp32 sums, one rounding",
        "x_scales may have any strides",
    ),
    reference=reference.linear_fp8,
    cases=_linear_cases,
    observe=lambda _, result: {"out": result},
    tolerances=by_dtype(COARSE_SUM, HALF_SUM),
    flops=lambda a: 2 * int(a[0].shape[0]) * int(a[2].numel()),
    min_bytes=_linear_bytes,
)

MOE_FP8 = OpSpec(
    name="moe_fp8",
    summary="Σ_j weight[r, j] · down_e(q(silu(gate_e x_r) · up_e x_r)), q: quantise_rows",
    arguments=(
        Argument("x", "codes [R, D], scales", f"{FP8}, float32"),
        Argument("expert_ids", "[R, k]", "int64"),
        Argument("expert_weights", "[R, k]", "any float"),
        Argument("gate_up", "codes [E, 2 I, D], scales", f"{FP8}, float32"),
        Argument("down", "codes [E, D, I], scales", f"{FP8}, float32"),
        Argument("is_power_of_two", "", "bool"),
        Argument("dtype", "", "torch.dtype of the result"),
    ),
    constraints=(
        "an expert of −1 adds nothing",
        "no row names an expert twice",
        "I is a multiple of 128",
        "hidden values are quantised from fp32",
    ),
    reference=reference.moe_fp8,
    cases=_moe_cases,
    observe=lambda _, result: {"out": result},
    tolerances=by_dtype(MIXED, HALF_MIXED),
    flops=_moe_flops,
    min_bytes=_moe_bytes,
)

SPECS = (QUANTISE_ROWS, SILU_QUANTISE, LINEAR_FP8, MOE_FP8)
