"""Cases H of reference/bugs.md that are about the indexer's operators alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.layouts import KVLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.spec.draw import rope_rows
from gnomon.models.params import param_dtype, param_specs
from gnomon.models.sources import parse_model_spec
from tests.laws.bugs.op_cases import PROVIDERS, operators, watched
from tests.laws.bugs.plain_model import rotate
from tests.laws.bugs.tiny import Bench, Token, assert_same_rows, t0_spec, token_list


def prepared(
    provider: str, rows: tuple[RopeRows, RopeRows], transform: IndexTransform, layout: KVLayout
) -> tuple[Tensor, Tensor]:
    """(queries, stored keys) of random raw ones, all in float64."""
    num, dim = rows[0].axis.num_rows, layout.dim
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(num, 4, dim, generator=generator, dtype=torch.float64)
    k = torch.randn(num, dim, generator=generator, dtype=torch.float64)
    pool = layout.allocate(num + 1, 1)
    kernel = operators(provider).kernels["index_prepare"]
    query = kernel(q, k, transform, rows, pool, torch.arange(num) + 1)
    return query, layout.gather(pool, torch.arange(num) + 1)


@pytest.mark.parametrize("has_hadamard", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_h3_the_fused_path_honours_the_style(interleaved: bool, has_hadamard: bool) -> None:
    """One rotation for queries and keys (fused) = two equal ones (not fused) = plain maths."""
    dim, turned, positions = 16, 8, [0, 5, 17, 40]
    ones = torch.linspace(0.5, 1.5, dim, dtype=torch.float64)
    transform = IndexTransform(ones, ones - 1, has_hadamard=has_hadamard)
    rows = rope_rows(positions, turned, interleaved)
    twin = rope_rows(positions, turned, interleaved)
    layout = PlainLayout(torch.float64, dim)
    results = [
        prepared(provider, pair, transform, layout)
        for provider in PROVIDERS
        for pair in ((rows, rows), (rows, twin))
    ]
    generator = torch.Generator().manual_seed(3)
    raw = torch.randn(4, 4, dim, generator=generator, dtype=torch.float64)
    frequency = 10000.0 ** (-2.0 * torch.arange(turned // 2, dtype=torch.float64) / turned)
    angle = torch.tensor(positions)[:, None] * frequency
    plain = torch.cat((rotate(raw[..., :turned], angle, interleaved), raw[..., turned:]), -1)
    if transform.hadamard is not None:
        plain = plain @ transform.hadamard.double()
    for query, key in results:
        assert torch.allclose(query, plain, atol=1e-6)
        assert torch.allclose(query, results[0][0], atol=1e-12)
        assert torch.allclose(key, results[0][1], atol=1e-12)


def test_h4_rotation_halves_the_error_of_outliers() -> None:
    """Queries and keys with an outlier channel, packed to FP8: the rotated dot is nearer by far."""
    dim, num = 128, 64
    generator = torch.Generator().manual_seed(4)
    key, query = (torch.randn(num, dim, generator=generator) for _ in range(2))
    key[:, 5] *= 300
    query[:, 5] *= 300
    matrix = IndexTransform(torch.ones(dim), torch.zeros(dim), has_hadamard=True).hadamard
    assert matrix is not None
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=1e-5)
    layout = Fp8IndexKeyLayout(dim, torch.float64)
    exact, errors = query.double() @ key.double().T, []
    for turn in (torch.eye(dim), matrix):
        q, k = (layout.dequantise(layout.quantise(x @ turn)) for x in (query, key))
        errors.append(float((q @ k.T - exact).norm()))
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("hadamard", ["true", "false"])
def test_h4_the_choice_is_a_recorded_config_value(hadamard: str) -> None:
    """Exact in real arithmetic: no row changes; the config, hence the cache's name, tells it."""
    tokens, rows = token_list(40), []
    for value in (hadamard, "false"):
        bench = Bench(fields={"hadamard": value})
        assert bench.config.index_hadamard == (value == "true")
        assert bench.model.layers[0].indexer is not None
        assert bench.model.layers[0].indexer.transform.has_hadamard == (value == "true")
        rows.append(bench.prefill([bench.request("r", tokens)]))
    assert_same_rows(rows[0], rows[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_h5_the_index_gate_is_computed_in_float32(dtype: torch.dtype) -> None:
    """In every engine dtype; rounding it to bf16 moves the selection of some rows."""
    spec = next(
        s
        for s in param_specs(parse_model_spec(t0_spec()).config)
        if s.name.endswith("weights_proj.weight")
    )
    assert param_dtype(spec, dtype) == torch.float32
    bench, gates = Bench(dtype=dtype), []
    moved = 0

    def watch(name: str, args: tuple[Any, ...]) -> None:
        nonlocal moved
        if name == "index_scores":
            q, weights, keys, count, scale = args
            gates.append(weights)
            kernels = operators("torch", dtype).kernels
            sets = [
                kernels["topk"](kernels["index_scores"](q, gate, keys, count, scale), count, 8).ids
                for gate in (weights, weights.bfloat16())
            ]
            moved += int((sets[0] != sets[1]).any(1).sum())

    bench.ops = watched(bench.ops, watch)
    bench.prefill([bench.request("r", token_list(120))])
    assert gates
    assert all(gate.dtype == torch.float32 for gate in gates)
    assert any(not torch.equal(gate, gate.bfloat16().float()) for gate in gates)
    assert moved > 0


@pytest.mark.parametrize("num_rows", [8, 9, 33])
def test_h8_selection_leaves_its_inputs_as_they_are(num_rows: int) -> None:
    """Nothing is accumulated in place on what rows share; 8 rows a chunk or 9, one result."""
    tokens, bench = token_list(60), Bench()
    expected = bench.prefill([bench.request("r", tokens)])
    pairs: list[tuple[Tensor, Tensor]] = []  # every input, and what it was

    def keep(name: str, args: tuple[Any, ...]) -> None:
        if name in ("index_scores", "index_scores_paged", "topk"):
            pairs.extend((a, a.clone()) for a in args if isinstance(a, Tensor))

    bench.ops = watched(operators(), keep)
    one, got = bench.request("r", tokens), dict[Token, Tensor]()
    while one.done < 60:
        work = [(one, min(num_rows, 60 - one.done))]
        geometry = bench.geometry(work)
        rows = geometry.rows
        pairs = [(t, t.clone()) for t in (rows.kv_len, rows.position, rows.request)]
        got |= bench.step(work, change=lambda _, made=geometry: made)
        assert len(pairs) > 3 or one.done <= 8
        assert all(torch.equal(now, before) for now, before in pairs)
    assert_same_rows(expected, got)
