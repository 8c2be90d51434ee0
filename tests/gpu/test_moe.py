"""Experts and FP8 linears of the triton provider on a GPU: specs, real widths, bits, graphs.

The oracle at real widths is float32 (IEEE) arithmetic over exactly decoded numbers, written here.
One process, under a minute with a cold kernel cache.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.block_fp8 import dequantised, dequantised_rows
from gnomon.attention.dispatch import KernelSet
from gnomon.attention.spec import SPECS, Scale
from tests.gpu.cases_on_gpu import OnGpu, wrong_cases

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
OPS = ["quantise_rows", "silu_quantise", "linear_fp8", "moe", "moe_fp8"]


def kernels(is_fixed: bool = False) -> dict[str, Any]:
    """Of both modules; imported in the test, as triton is not everywhere."""
    package = "gnomon.attention.providers.triton"
    linear, moe = (importlib.import_module(f"{package}.{name}") for name in ("linear", "moe"))
    return {**linear.FIXED, **moe.FIXED} if is_fixed else {**linear.KERNELS, **moe.KERNELS}


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("op", OPS)
def test_every_case_of_the_specs(op: str, dtype: torch.dtype) -> None:
    wrong = wrong_cases(SPECS[op], OnGpu(KernelSet("triton", 20, kernels())), dtype, Scale())
    if op in kernels(is_fixed=True):
        fixed = OnGpu(KernelSet("triton fixed", 20, kernels(is_fixed=True)))
        wrong += wrong_cases(SPECS[op], fixed, dtype, Scale())
    assert wrong == []


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=Generator("cuda").manual_seed(seed), device="cuda")


def fp8_weight(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """About unit gain."""
    *lead, rows, columns = shape
    codes = (drawn(*shape, seed=seed) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = (*lead, -(-rows // 128), -(-columns // 128))
    scales = torch.rand(grid, device="cuda") + 0.5
    return codes, scales * columns**-0.5 / 100


def close(found: Tensor, expected: Tensor, share: float) -> None:
    """Relative root mean square below ``share``, and no wild element."""
    difference = (found.double() - expected.double()).abs()
    size = expected.double().square().mean().sqrt()
    error = float(difference.square().mean().sqrt() / size)
    assert error < share, f"relative error {error:.2e}, allowed {share:.0e}"
    worst = float(difference.max() / size)
    assert worst < 40 * share, f"worst {worst:.2e} of the size, allowed {40 * share:.0e}"


SHAPES = [(2112, 7168), (24576, 1536), (7168, 16384), (7168, 2048), (3072, 1536), (300, 1000)]


@pytest.mark.parametrize("num_rows", [1, 16, 33, 64, 128, 129, 1000])
def test_linears_at_real_widths(num_rows: int) -> None:
    ops, fixed = kernels(), kernels(is_fixed=True)
    for columns, width in SHAPES:
        weight = fp8_weight(columns, width)
        x = ops["quantise_rows"](drawn(num_rows, width, seed=9).to(BF16), False)
        expected = dequantised_rows(*x, F32) @ dequantised(*weight, F32).T
        close(ops["linear_fp8"](*x, *weight, F32), expected, 2e-3)
        close(fixed["linear_fp8"](*x, *weight, BF16), expected, 4e-3)


def choices(num_rows: int, num_experts: int, k: int = 8) -> tuple[Tensor, Tensor]:
    noise = torch.rand(num_rows, num_experts, device="cuda")
    ids = noise.topk(k, dim=1).indices
    ids[::5, 3] = -1
    return ids, torch.rand(num_rows, k, device="cuda") / k


def mixed(x: Tensor, ids: Tensor, shares: Tensor, experts: Any, quantise: Any) -> Tensor:
    """Expert by expert in fp32; ``experts(e)`` gives gate_up and down, ``quantise`` the hidden."""
    out = torch.zeros_like(x)
    for expert in ids[ids >= 0].unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        gate_up, down = experts(expert)
        gate, up = (x[rows] @ gate_up.T).chunk(2, -1)
        hidden = quantise(torch.nn.functional.silu(gate) * up)
        out.index_add_(0, rows, (hidden @ down.T) * shares[rows, places, None])
    return out


@pytest.mark.parametrize("num_rows", [1, 7, 64, 128, 700])
@pytest.mark.parametrize(("num_experts", "width"), [(32, 2048), (256, 256)])
def test_experts_at_real_widths(num_experts: int, width: int, num_rows: int) -> None:
    ops, fixed = kernels(), kernels(is_fixed=True)
    gate_up = fp8_weight(num_experts, 2 * width, 7168)
    down = fp8_weight(num_experts, 7168, width)
    ids, shares = choices(num_rows, num_experts)
    x = ops["quantise_rows"](drawn(num_rows, 7168, seed=9).to(BF16), False)

    def experts(e: int) -> tuple[Tensor, Tensor]:
        return dequantised(gate_up[0][e], gate_up[1][e], F32), dequantised(
            down[0][e], down[1][e], F32
        )

    def rounded(hidden: Tensor) -> Tensor:
        return dequantised_rows(*ops["quantise_rows"](hidden, False), F32)

    expected = mixed(dequantised_rows(*x, F32), ids, shares, experts, rounded)
    # FP8 tensor cores keep 14 bits of a sum; that moves one or two of 100 hidden codes by a step.
    for found in (ops, fixed):
        close(found["moe_fp8"](x, ids, shares, gate_up, down, False, BF16), expected, 2.5e-2)


@pytest.mark.parametrize("num_rows", [1, 64, 700])
def test_plain_experts_at_real_widths(num_rows: int) -> None:
    ops, fixed = kernels(), kernels(is_fixed=True)
    gate_up = (drawn(16, 2 * 2048, 4096) / 64).to(BF16)
    down = (drawn(16, 4096, 2048) / 45).to(BF16)
    ids, shares = choices(num_rows, 16)
    x = drawn(num_rows, 4096, seed=9).to(BF16)
    expected = mixed(
        x.float(), ids, shares, lambda e: (gate_up[e].float(), down[e].float()), lambda h: h
    )
    for found in (ops, fixed):
        close(found["moe"](x, ids, shares, gate_up, down), expected, 8e-3)


def test_many_rows_take_the_sort_by_chunks() -> None:
    ops = kernels()
    gate_up, down = fp8_weight(64, 512, 512), fp8_weight(64, 512, 256)
    ids, shares = choices(3000, 64)
    x = ops["quantise_rows"](drawn(3000, 512, seed=9), False)
    found = ops["moe_fp8"](x, ids, shares, gate_up, down, False, F32)
    part = slice(1000, 1100)
    some = (x[0][part], x[1][part]), ids[part], shares[part]
    close(ops["moe_fp8"](*some, gate_up, down, False, F32), found[part], 2.5e-2)


def test_bits_of_a_row_do_not_hang_on_its_neighbours() -> None:
    fixed, ops = kernels(is_fixed=True), kernels()
    gate_up, down = fp8_weight(32, 1024, 2048), fp8_weight(32, 2048, 512)
    ids, shares = choices(600, 32)
    x = ops["quantise_rows"](drawn(600, 2048).to(BF16), True)
    whole = fixed["moe_fp8"](x, ids, shares, gate_up, down, True, BF16)
    product = fixed["linear_fp8"](*x, gate_up[0][0], gate_up[1][0], BF16)
    for rows in (slice(0, 1), slice(5, 69), slice(100, 599)):
        some = x[0][rows], x[1][rows]
        again = fixed["moe_fp8"](some, ids[rows], shares[rows], gate_up, down, True, BF16)
        assert torch.equal(again, whole[rows])
        again = fixed["linear_fp8"](*some, gate_up[0][0], gate_up[1][0], BF16)
        assert torch.equal(again, product[rows])


NUMBERS = (1, 8, 40, 100, 300, 600, 1200, 3000, 70000)  # of rows, or of pairs, that choose a tile


@pytest.mark.parametrize("dtype", [F16, BF16, torch.float8_e4m3fn])
def test_tiles_of_a_fixed_mixture_give_equal_bits(dtype: torch.dtype) -> None:
    """Every pair of tiles that some number of pairs takes, over the same rows."""
    module = importlib.import_module("gnomon.attention.providers.triton.moe")
    is_fp8 = dtype.itemsize == 1
    ids, shares = choices(200, 32)
    x = drawn(200, 2048, seed=9).to(BF16 if is_fp8 else dtype)
    shapes = (32, 2 * 1024, 2048), (32, 2048, 1024)
    if is_fp8:
        weights = fp8_weight(*shapes[0]), fp8_weight(*shapes[1])
        rows, down = kernels()["quantise_rows"](x, False), weights[1][0]
    else:
        weights = tuple((drawn(*shape) * shape[2] ** -0.5).to(dtype) for shape in shapes)
        down = weights[1]
    results = {}
    for chosen in {module.fixed_tiles(number, down) for number in NUMBERS}:
        if is_fp8:
            found = module.run_moe_fp8(rows, (ids, shares), weights, (False, BF16), chosen)
        else:
            found = module.run_moe(x, (ids, shares), *weights, chosen)
        results[chosen] = found
    first, *others = results
    unlike = {other: int((results[other] != results[first]).sum()) for other in others}
    assert {tile: number for tile, number in unlike.items() if number} == {}, first


@pytest.mark.parametrize("shape", [(2112, 7168), (7168, 16384), (24576, 1536), (300, 1000)])
def test_tiles_of_a_fixed_linear_give_equal_bits(shape: tuple[int, int]) -> None:
    package = "gnomon.attention.providers.triton"
    module, tiles = (importlib.import_module(f"{package}.{name}") for name in ("linear", "tiles"))
    weight = fp8_weight(*shape)
    x = kernels()["quantise_rows"](drawn(200, shape[1], seed=9).to(BF16), False)
    are_equal = tiles.has_equal_tiles(weight[0].device, weight[0].dtype)
    chosen = {tiles.fixed_linear_tile(number, *shape, are_equal) for number in NUMBERS}
    results = {tile: module.run_linear(x, weight, F32, tile) for tile in chosen}
    first, *others = results
    unlike = {other: int((results[other] != results[first]).sum()) for other in others}
    assert {tile: number for tile, number in unlike.items() if number} == {}, first


@pytest.mark.parametrize("num_rows", [16, 900])
def test_a_captured_mixture_follows_its_inputs(num_rows: int) -> None:
    """Replayed with other rows and other experts it gives what an eager call gives."""
    ops = kernels()
    gate_up, down = fp8_weight(32, 1024, 2048), fp8_weight(32, 2048, 512)

    def layer(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        rows = ops["quantise_rows"](x, False)
        out: Tensor = ops["moe_fp8"](rows, ids, shares, gate_up, down, False, BF16)
        return out

    x, (ids, shares) = drawn(num_rows, 2048).to(BF16), choices(num_rows, 32)
    layer(x, ids, shares)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, ids, shares)
    x.copy_(drawn(num_rows, 2048, seed=1))
    other_ids, other_shares = choices(num_rows, 32)
    ids.copy_(other_ids.roll(3, 0))
    shares.copy_(other_shares)
    graph.replay()
    assert torch.equal(captured, layer(x, ids, shares))
