"""Products with fixed bits under the interpreter: right, and a row's bits its own at any M."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.ops.products import TORCH
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.providers import triton as triton_provider
from gnomon.attention.providers.triton import fixed
from gnomon.attention.providers.triton.fixed import choose_fixed_tile, linear, multiply_heads
from gnomon.errors import UnsupportedError
from gnomon.models.linear import WideLinear

# The interpreter turns run-time bounds of a range, arrays of one number, into ints.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
BF16, F32 = torch.bfloat16, torch.float32
DTYPES = [F32, BF16, torch.float16]
COUNTS = (1, 2, 7, 16, 63, 64, 65, 70)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within a rounding to ``dtype`` of float64 sums of unit scale."""
    share = {F32: 2e-6, BF16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=share, atol=4e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(64, 96), (130, 80), (3, 40), (48, 2100)])
def test_linear_gives_the_product(columns: int, depth: int, dtype: torch.dtype) -> None:
    """Columns beyond the last tile, depths beyond the last step, K in parts."""
    x, weight = drawn((35, depth), dtype, 1), drawn((columns, depth), dtype, 2)
    weight *= depth**-0.5
    expected = x.double() @ weight.double().T
    close(linear(x, weight), expected, dtype)
    close(linear(x, weight, F32), expected, F32)
    wider = torch.cat((x, x), 1)
    assert torch.equal(linear(wider[:, :depth], weight), linear(x, weight))
    assert linear(x[:0], weight).shape == (0, columns)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_give_the_products(dtype: torch.dtype) -> None:
    """As absorption takes them: slices of rows, and a matrix of weights seen from either side."""
    heads, nope, values, latent = 3, 24, 40, 144
    up = drawn((heads, nope + values, latent), dtype, 3) * latent**-0.5
    query = drawn((21, heads, nope + 8), dtype, 4)[..., :nope]
    absorbed = multiply_heads(query, up[:, :nope])
    close(absorbed, torch.einsum("mhk,hkn->mhn", query.double(), up[:, :nope].double()), dtype)
    carried = multiply_heads(absorbed, up[:, nope:].transpose(1, 2))
    close(carried, torch.einsum("mhn,hvn->mhv", absorbed.double(), up[:, nope:].double()), dtype)
    assert carried.is_contiguous()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_rows_bits_hang_on_no_other_row(dtype: torch.dtype) -> None:
    weight, up = drawn((96, 2048), dtype, 5), drawn((2, 32, 64), dtype, 6)
    x, query = drawn((70, 2048), dtype, 7), drawn((70, 2, 32), dtype, 8)
    whole, absorbed = linear(x, weight), multiply_heads(query, up)
    order = torch.randperm(70, generator=Generator().manual_seed(9))
    for count in COUNTS:
        rows = order[:count]
        assert torch.equal(linear(x[rows], weight), whole[rows]), count
        assert torch.equal(multiply_heads(query[rows], up), absorbed[rows]), count


@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_weight_fill_a_device_without_many_tiles(
    dtype: torch.dtype, on_hopper: bool
) -> None:
    def parts(num_columns: int, depth: int) -> int:
        return choose_fixed_tile(num_columns, depth, dtype, on_hopper, num_columns <= 4096).parts

    assert [parts(128, 7168), parts(768, 7168), parts(2112, 7168)] == [16, 5, 1]
    assert parts(129_280, 7168) == parts(64, 512) == 1


def test_they_are_bound_where_bits_are_fixed_and_only_there() -> None:
    for dtype in DTYPES:
        ops, _ = bind_operators(
            OpNeed(dtype=dtype, is_deterministic=True), (triton_provider.PROVIDER,)
        )
        assert ops.products.is_fixed
        assert ops.products.linear is fixed.linear
    for need in (OpNeed(), OpNeed(is_deterministic=True)):
        ops, _ = bind_operators(need, (torch_provider.PROVIDER,))
        assert ops.products is TORCH
    with pytest.raises(UnsupportedError, match="hang on the batch on cuda"):
        bind_operators(OpNeed("cuda", is_deterministic=True), (torch_provider.PROVIDER,))


def test_wide_products_of_parts_keep_their_bits() -> None:
    need = OpNeed(dtype=BF16, is_deterministic=True)
    ops, _ = bind_operators(need, (triton_provider.PROVIDER,))
    parts = drawn((3, 8, 64), BF16, 1)
    layer = WideLinear(parts.float().sum(0), parts.flatten(0, 1))
    x = drawn((37, 64), BF16, 2)
    whole = layer(x, ops)
    expected = x.double() @ parts.double().sum(0).T
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4)
    for count in (1, 5, 36):
        assert torch.equal(layer(x[:count], ops), whole[:count])
