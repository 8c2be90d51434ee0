"""Every kernel of every built-in provider against its operator's spec, in every dtype.

Also: the specs and the operators name each other, and the check itself finds wrong kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gnomon.attention.dispatch import OPERATORS, KernelSet
from gnomon.attention.providers import builtin_providers, reference
from gnomon.attention.providers import torch as torch_provider
from gnomon.attention.spec import SPECS, Scale, check_all, check_provider

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FAST = torch_provider.PROVIDER.kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("provider", builtin_providers(), ids=lambda p: p.name)
@pytest.mark.parametrize("op", OPERATORS)
def test_provider_meets_spec(op: str, provider: KernelSet, dtype: torch.dtype) -> None:
    results = check_all({op: SPECS[op]}, provider, dtype, seed=7)
    assert results, "a spec without cases checks nothing"
    wrong = [result for result in results if not result.is_ok]
    assert not wrong, wrong


@pytest.mark.parametrize("op", torch_provider.PROVIDER.fixed)
def test_kernels_with_fixed_bits_meet_spec(op: str) -> None:
    fixed = KernelSet("torch, fixed", 0, torch_provider.PROVIDER.fixed)
    wrong = [r for r in check_all({op: SPECS[op]}, fixed, torch.float32, seed=7) if not r.is_ok]
    assert not wrong, wrong


def test_specs_and_operators_name_each_other() -> None:
    assert tuple(sorted(SPECS)) == tuple(sorted(OPERATORS))
    for provider in builtin_providers():
        assert set(provider.kernels) == set(OPERATORS)


@pytest.mark.parametrize("op", OPERATORS)
def test_cases_repeat_for_a_seed_and_cost_something(op: str) -> None:
    spec = SPECS[op]

    def draw() -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        return list(spec.cases(generator, torch.float32, Scale()))

    first, second = draw(), draw()
    assert [case.label for case in first] == [case.label for case in second]
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.arguments, other.arguments, strict=True):
            if isinstance(a, torch.Tensor):
                assert torch.equal(a.double().nan_to_num(7.0), b.double().nan_to_num(7.0))
    assert spec.min_bytes(first[0].arguments) > 0
    assert spec.flops(first[0].arguments) >= 0
    assert len(spec.arguments) == len(first[0].arguments)


def torch_topk(scores: torch.Tensor, count: torch.Tensor, k: int, want: bool) -> Any:
    """What torch.topk alone would do: no tie rule, NaN first."""
    right = FAST["topk"](scores, count, k, want)
    if scores.shape[1] <= k:
        return right
    ids = scores.topk(k, dim=1).indices.int().sort(dim=1).values
    ids = torch.where(count[:, None] <= k, right.ids, ids)
    return type(right)(ids, right.count, right.margin, right.nan_rows)


def halved_rope(x: torch.Tensor, rows: Any) -> torch.Tensor:
    """Every table read as half-split."""
    turned = FAST["rope"](x, rows)
    dim = rows.dim
    wrong = x[..., :dim].roll(dim // 2, -1)
    return torch.cat((wrong, turned[..., dim:]), -1)


def stray_write(*arguments: Any) -> None:
    """Also writes rows whose slot is −1, to slot 0."""
    kv, weight, eps, rows, pool, slots = arguments
    FAST["latent_write"](kv, weight, eps, rows, pool, slots)
    if len(kv) and int(slots.min()) < 0:
        pool.typed()[0] = 1.0


def nan_for_empty(*arguments: Any) -> Any:
    """Softmax over no key at all."""
    out, lse = FAST["sparse_mla"](*arguments)
    return out.masked_fill((arguments[4] == 0)[:, None, None], math.nan), lse


def plus_inf_for_empty(*arguments: Any) -> Any:
    """The other convention for the lse of an empty row."""
    out, lse = FAST["sparse_mla"](*arguments)
    return out, lse.masked_fill(lse == -math.inf, math.inf)


def unweighted(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    return FAST["moe"](x, ids, torch.ones_like(weights), gate_up, down)


def gate_last(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    return FAST["moe"](x, ids, weights, gate_up.roll(down.shape[-1], 1), down)


def no_relu(q: Any, weights: Any, keys: Any, count: Any, scale: float) -> Any:
    scores = torch.einsum("mhd,nd,mh->mn", q, keys, weights) * scale
    return scores.masked_fill(torch.arange(keys.shape[0]) >= count[:, None], -math.inf)


def biased_variance(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    deviation = x - x.mean(-1, keepdim=True)
    variance = (deviation * deviation).sum(-1, keepdim=True) / (x.shape[-1] - 1)
    return deviation / (variance + eps).sqrt() * weight + bias


WRONG: list[tuple[str, Callable[..., Any]]] = [
    ("topk", torch_topk),
    ("rope", halved_rope),
    ("latent_write", stray_write),
    ("sparse_mla", nan_for_empty),
    ("sparse_mla", plus_inf_for_empty),
    ("moe", unweighted),
    ("moe", gate_last),
    ("index_scores", no_relu),
    ("layer_norm", biased_variance),
    ("rms_norm", lambda x, weight, eps: FAST["rms_norm"](x, weight, eps * 10)),
    ("dense_mha", lambda q, k, v, see, scale: FAST["dense_mha"](q, k, v, see, scale * 1.001)),
    ("lse_merge", lambda a, la, b, lb: (a, la)),
    ("context_gather", lambda pool, pages, start, n: FAST["context_gather"](pool, pages, 0, n)),
    ("rms_norm", lambda x, weight, eps: FAST["rms_norm"](x, weight, eps)[..., None]),
]


@pytest.mark.parametrize(("op", "kernel"), WRONG)
def test_a_wrong_kernel_is_found(op: str, kernel: Callable[..., Any]) -> None:
    provider = KernelSet("wrong", 1, {op: kernel})
    results = check_all({op: SPECS[op]}, provider, torch.float32, seed=7)
    assert any(not result.is_ok for result in results)


def test_result_says_where() -> None:
    spec = SPECS["rms_norm"]
    case = next(spec.cases(torch.Generator().manual_seed(0), torch.float32, Scale()))

    def wrong_at_one_place(x: Any, weight: Any, eps: float) -> Any:
        out = FAST["rms_norm"](x, weight, eps)
        out[4, 17] += 0.5
        return out

    result = check_provider(spec, KernelSet("wrong", 1, {"rms_norm": wrong_at_one_place}), case)
    assert (result.is_ok, result.where) == (False, "out[4, 17]")
    assert result.worst == pytest.approx(0.5, abs=1e-5)
    right = check_provider(spec, reference.PROVIDER, case)
    assert right.is_ok
    assert right.worst < 1e-6
