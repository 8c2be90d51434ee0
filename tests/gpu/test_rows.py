"""Row and cache kernels on a GPU: specs, real widths, packed bytes, the joined launch, graphs.

Oracles: the specs' references in float64; the torch provider on the CPU for packed bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, KVLayout, PlainLayout
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.routing import RouterRule, route
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.providers import builtin_providers
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.routes import AttentionDims
from gnomon.attention.spec import SPECS, Scale
from gnomon.attention.spec.draw import normal, page_lists, rope_rows
from gnomon.models.linear import WideLinear
from tests.gpu.cases_on_gpu import OnGpu, on_device, wrong_cases

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("rms_norm", "layer_norm", "rope", "latent_write", "index_prepare", "context_gather")
BIG = Scale(
    num_rows=37,
    num_keys=300,
    page_size=64,
    dims=AttentionDims(
        num_heads=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_topk=2048,
        index_num_heads=64,
        index_head_dim=128,
    ),
    hidden_size=7168,
)
PAGE = 64


def module(name: str) -> Any:
    return importlib.import_module(f"gnomon.attention.providers.triton.{name}")


@pytest.mark.parametrize("scale", [Scale(), BIG], ids=["tiny", "real"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_case_of_the_specs(op: str, dtype: torch.dtype, scale: Scale) -> None:
    provider = OnGpu(importlib.import_module("gnomon.attention.providers.triton").PROVIDER)
    assert wrong_cases(SPECS[op], provider, dtype, scale) == []


def on_gpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a function of things on the CPU."""

    def run(*arguments: Any) -> Any:
        moved = tuple(on_device(argument, "cuda") for argument in arguments)
        result = kernel(*moved)
        for here, there in zip(arguments, moved, strict=True):
            if isinstance(here, PagedPool):
                here.storage.copy_(there.storage)
        return on_device(result, "cpu")

    return run


def close_in(found: PagedPool, expected: PagedPool) -> None:
    equal = (found.storage == expected.storage).float().mean()
    assert equal > 0.995, f"{100 - 100 * equal:.2f} % of the bytes differ"
    slots, layout = torch.arange(found.num_slots), found.layout.computing_in(torch.float32)
    a, b = (layout.gather(PagedPool(layout, p.storage, PAGE), slots) for p in (found, expected))
    torch.testing.assert_close(a, b, rtol=2.0**-3, atol=2.0**-8, equal_nan=True)


@pytest.mark.parametrize(
    "layout",
    [
        Fp8LatentLayout(512, 64),
        Fp8LatentLayout(512, 0),
        Fp8LatentLayout(512, 0, has_empty_rope_slot=True),
        Fp8LatentLayout(64, 32),
    ],
    ids=lambda layout: layout.id,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_latents(layout: Fp8LatentLayout, dtype: torch.dtype) -> None:
    rank, rope, generator = layout.latent_dim, layout.rope_dim, Generator().manual_seed(2)
    kv, weight = normal(generator, (150, rank + rope), dtype), normal(generator, (rank,), dtype)
    weight[: rank // 2] *= 1e-3
    slots = torch.randperm(4 * PAGE, generator=generator)[:150] + PAGE
    slots[::7] = -1
    rows = rope_rows(list(range(150)), rope, True)
    found, expected = layout.allocate(5, PAGE), layout.allocate(5, PAGE)
    on_gpu(module("cache").latent_write)(kv, weight, 1e-6, rows, found, slots)
    torch_provider.latent_write(kv, weight, 1e-6, rows, expected, slots)
    close_in(found, expected)


def index_inputs(dtype: torch.dtype, dim: int, has_hadamard: bool) -> tuple[Any, ...]:
    generator = Generator().manual_seed(3)
    q, k = normal(generator, (70, 32, dim), dtype), normal(generator, (70, dim), dtype)
    weight, bias = (normal(generator, (dim,), dtype) for _ in range(2))
    rows = rope_rows(list(range(70)), 16, False)
    return q, k, IndexTransform(weight, bias, 1e-6, has_hadamard), (rows, rows)


@pytest.mark.parametrize("dim", [128, 32])
@pytest.mark.parametrize("has_hadamard", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_index_keys(dtype: torch.dtype, has_hadamard: bool, dim: int) -> None:
    layout, inputs = Fp8IndexKeyLayout(dim, dtype), index_inputs(dtype, dim, has_hadamard)
    slots = torch.arange(70) + PAGE
    found, expected = layout.allocate(4, PAGE), layout.allocate(4, PAGE)
    a = on_gpu(module("cache").index_prepare)(*inputs, found, slots)
    b = torch_provider.index_prepare(*inputs, expected, slots)
    close_in(found, expected)
    assert (a == b).float().mean() > 0.99
    torch.testing.assert_close(a, b, rtol=2.0**-3, atol=2.0**-8)


@pytest.mark.parametrize("read", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "layout",
    [Fp8LatentLayout(512, 64), Fp8LatentLayout(64, 32), Fp8IndexKeyLayout(128),
     Fp8IndexKeyLayout(32), PlainLayout(torch.bfloat16, 576), PlainLayout(torch.float32, 96)],
    ids=lambda layout: layout.id,
)  # fmt: skip
def test_gathered_entries_are_exact(layout: KVLayout, read: torch.dtype) -> None:
    reading, generator = layout.computing_in(read), Generator().manual_seed(4)
    pages, num_pages = page_lists(generator, [1000, 70], PAGE)
    pool = reading.allocate(num_pages, PAGE, page_stride_bytes=layout.page_bytes(PAGE) + 256)
    values = normal(generator, (num_pages * PAGE, layout.dim), torch.float32)
    reading.write(pool, torch.arange(num_pages * PAGE), values)
    for start, length in ((0, 1000), (5, 777), (999, 1)):
        found = on_gpu(module("cache").context_gather)(pool, pages[0], start, length)
        assert torch.equal(found, reading.gather_range(pool, pages[0], start, length))


def attention_inputs(num_rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """(q_rope, rotations), latent write, index preparation but for pools and slots; on the GPU."""
    generator = Generator().manual_seed(5)
    rows = rope_rows(list(range(num_rows)), 64, True)
    wide = normal(generator, (num_rows, 128, 192), dtype)
    kv = normal(generator, (num_rows, 2112), dtype)
    q, k = normal(generator, (num_rows, 64, 128), dtype), normal(generator, (num_rows, 128), dtype)
    norm, weight, bias = (normal(generator, (n,), dtype) for n in (512, 128, 128))
    moved = on_device((wide, rows, kv, norm, q, k, IndexTransform(weight, bias, 1e-6)), "cuda")
    wide, rows, kv, norm, q, k, transform = moved
    return (
        (wide[..., 128:], rows),
        (kv[:, 1536:], norm, 1e-6, rows),
        (q, k, transform, (rows, rows)),
    )


@pytest.mark.parametrize("num_rows", [1, 64, 1000])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_joined_launch_has_the_bits_of_the_three(is_packed: bool, num_rows: int) -> None:
    turn, latent, index = attention_inputs(num_rows, torch.bfloat16)
    layouts: tuple[KVLayout, KVLayout] = (
        (Fp8LatentLayout(512, 64), Fp8IndexKeyLayout(128))
        if is_packed
        else (PlainLayout(torch.bfloat16, 576), PlainLayout(torch.bfloat16, 128))
    )
    pools = [[x.allocate(20, PAGE, device="cuda") for x in layouts] for _ in range(2)]
    slots = torch.arange(num_rows, device="cuda") + PAGE
    found = module("prepare").prepare_attention(
        *turn, (*latent, pools[0][0], slots), (*index, pools[0][1], slots)
    )
    module("cache").latent_write(*latent, pools[1][0], slots)
    query = module("cache").index_prepare(*index, pools[1][1], slots)
    assert torch.equal(found[0], module("rows").rope(*turn))
    assert torch.equal(found[1], query)
    for a, b in zip(*pools, strict=True):
        assert torch.equal(a.storage, b.storage)
        assert a.storage.any()


def test_a_residual_norm_has_the_bits_of_its_parts() -> None:
    for dtype in DTYPES:
        generator = Generator().manual_seed(6)
        x, delta = (normal(generator, (33, 7168), dtype).cuda() for _ in range(2))
        weight = normal(generator, (7168,), dtype).cuda()
        total, normed = module("rows").add_rms_norm(x, delta, weight, 1e-6)
        assert torch.equal(total, x + delta)
        assert torch.equal(normed, module("rows").rms_norm(x + delta, weight, 1e-6))


def test_a_norm_in_fp8_has_the_bits_of_its_parts() -> None:
    generator, eps = Generator().manual_seed(8), 1e-6
    for width in (7168, 1536, 96):
        x, delta = (normal(generator, (33, width), torch.bfloat16).cuda() for _ in range(2))
        weight = normal(generator, (width,), torch.bfloat16).cuda()
        for is_power_of_two in (False, True):
            rest = (weight, eps, is_power_of_two)
            total, normed, found = module("rows_quantise").norm_quantise(x, delta, *rest)
            sums, expected = module("rows").add_rms_norm(x, delta, weight, eps)
            assert torch.equal(total, sums)
            assert torch.equal(normed, expected)
            codes, scales = module("linear_quantise").quantise_rows(expected, is_power_of_two)
            assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(found[1], scales)


def test_the_router_chooses_as_torch_does() -> None:
    generator = Generator().manual_seed(7)
    logits, bias = torch.randn(300, 256, generator=generator), torch.randn(256) * 0.2
    request = torch.arange(300, dtype=torch.int32).where(torch.arange(300) % 7 > 0, -1)
    for groups, kept in ((8, 4), (1, 1)):
        rule = RouterRule(8, groups, kept, True, 2.5)
        given = (logits.cuda(), bias.cuda(), request.cuda(), rule, True)
        found, expected = module("route").route_experts(*given), route(*given[:3], rule, True)
        assert torch.equal(found.expert_ids, expected.expert_ids)
        live = expected.expert_ids >= 0
        torch.testing.assert_close(found.weights[live], expected.weights[live])
        torch.testing.assert_close(found.margin, expected.margin, rtol=1e-4, atol=1e-5)


def test_a_captured_launch_reads_the_slots_of_its_replay() -> None:
    turn, latent, index = attention_inputs(8, torch.bfloat16)
    layouts = Fp8LatentLayout(512, 64), Fp8IndexKeyLayout(128)
    pools = [x.allocate(4, PAGE, device="cuda") for x in layouts]
    slots = torch.full((8,), -1, device="cuda")
    given = (*turn, (*latent, pools[0], slots), (*index, pools[1], slots))
    prepare = module("prepare").prepare_attention
    prepare(*given)
    torch.cuda.synchronize()
    assert not any(pool.storage.any() for pool in pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare(*given)
    slots.copy_(torch.arange(8) + 70)
    graph.replay()
    torch.cuda.synchronize()
    for pool in pools:
        held: Tensor = pool.layout.gather(pool, torch.arange(PAGE, 3 * PAGE, device="cuda"))
        assert held.any(-1).nonzero()[:, 0].tolist() == list(range(6, 14))


def test_rows_beyond_two_gigabytes_of_a_pool() -> None:
    layout = PlainLayout(torch.bfloat16, 576)
    pool = layout.allocate(40_000, PAGE, device="cuda")  # 2.9 GB
    slots = torch.tensor([39_999 * PAGE + 5, 30_000 * PAGE], device="cuda")
    rows: RopeRows = on_device(rope_rows([0, 0], 64, True), "cuda")
    kv = torch.ones(2, 576, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    module("cache").latent_write(kv, norm, 1e-6, rows, pool, slots)
    assert (pool.typed()[slots] == 1).all()
    pages = torch.tensor([39_999], dtype=torch.int32, device="cuda")
    assert (module("cache").context_gather(pool, pages, 5, 1) == 1).all()


def test_a_float32_weight_multiplies_half_rows_exactly() -> None:
    generator = Generator().manual_seed(9)
    x = normal(generator, (64, 7168), torch.bfloat16)
    ops, _ = bind_operators(OpNeed("cuda", torch.bfloat16), builtin_providers())
    for rounded in (torch.bfloat16, torch.float32):
        weight = normal(generator, (96, 7168), torch.float32).to(rounded).float()
        layer = WideLinear.of({"w.weight": weight.cuda()}, "w", torch.bfloat16)
        assert layer.parts is not None
        found = layer(x.cuda(), ops).cpu().double()
        expected = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T
        assert ((found - expected).abs() / size).max() < 2.0**-21
