"""Spec of the mixture of experts without router and shared experts (oracle_math.md §1.7)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator

from gnomon.attention.providers import reference
from gnomon.attention.spec.draw import expert_choices, normal
from gnomon.attention.spec.model import (
    UNIT_SUM,
    Argument,
    Arguments,
    Case,
    OpSpec,
    Scale,
    Tolerance,
    by_dtype,
    num_bytes,
)

HALF = Tolerance(
    2.0**-5, 2.0**-7, "half matmuls: hidden values, activations and products round to 2^-9 each"
)


def _cases(generator: Generator, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    experts, width = scale.num_experts, scale.moe_intermediate_size
    hidden = scale.hidden_size
    gate_up = normal(generator, (experts, 2 * width, hidden), dtype) * hidden**-0.5
    down = normal(generator, (experts, hidden, width), dtype) * width**-0.5
    plans = {"typical": scale.num_rows, "one row": 1, "many rows": 70, "no rows": 0}
    for label, num_rows in plans.items():
        x = normal(generator, (num_rows, hidden), dtype)
        ids = expert_choices(generator, num_rows, experts, scale.num_experts_per_tok)
        weights = torch.rand(ids.shape, generator=generator).to(dtype)
        yield Case(label, (x, ids, weights, gate_up, down))
        holes = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1)
        yield Case(f"{label}, some −1", (x, holes, weights, gate_up, down))
        yield Case(f"{label}, only −1", (x, ids * 0 - 1, weights, gate_up, down))
        crowd = ids.clone()
        crowd[:, 1:], crowd[:, :1] = -1, 3
        yield Case(f"{label}, one expert takes all", (x, crowd, weights, gate_up, down))


def _flops(arguments: Arguments) -> int:
    _, ids, _, gate_up, down = arguments
    return 2 * int((ids >= 0).sum()) * int(gate_up[0].numel() + down[0].numel())


def _bytes(arguments: Arguments) -> int:
    x, ids, weights, gate_up, down = arguments
    touched = int(ids[ids >= 0].unique().numel())
    return 2 * num_bytes(x) + num_bytes(ids, weights) + touched * num_bytes(gate_up[0], down[0])


MOE = OpSpec(
    name="moe",
    summary="Σ_j weight[r, j] · down_e(silu(gate_e x_r) · up_e x_r), e = expert_ids[r, j]",
    arguments=(
        Argument("x", "[R, D]", "any float"),
        Argument("expert_ids", "[R, k]", "int64"),
        Argument("expert_weights", "[R, k]", "any float"),
        Argument("gate_up", "[E, 2 I, D]", "as x"),
        Argument("down", "[E, D, I]", "as x"),
    ),
    constraints=(
        "an expert of −1 adds nothing",
        "no row names an expert twice",
        "a row's bits in fp32 depend on that row alone",
    ),
    reference=reference.moe,
    cases=_cases,
    observe=lambda _, result: {"out": result},
    tolerances=by_dtype(UNIT_SUM, HALF),
    flops=_flops,
    min_bytes=_bytes,
)

SPECS = (MOE,)
