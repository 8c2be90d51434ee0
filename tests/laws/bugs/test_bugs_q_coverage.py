"""Cases Q of reference/bugs.md: coverage of kernels: heads, widths, architectures."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from gnomon.attention.dispatch import (
    OPERATORS,
    KernelSet,
    OpNeed,
    Requirement,
    bind_operators,
    explain_rows,
)
from gnomon.attention.plan import plan_step
from gnomon.attention.providers import builtin_providers
from gnomon.errors import ConfigError, UnsupportedError
from tests.laws.bugs.engines import bug_core, outputs, prompt, request
from tests.laws.bugs.op_cases import PROVIDERS, op_case, operators
from tests.laws.bugs.plain_model import best_sets, plain_run
from tests.laws.bugs.tiny import NEVER, Bench, assert_same_rows, token_list

PORTABLE = builtin_providers()


def new_kernel(rank: int = 0) -> KernelSet:
    """A provider for one architecture: best in rank, for a device that is not here."""
    kernels = {op: lambda *_: pytest.fail("not for this machine") for op in OPERATORS}
    return KernelSet("sm100", rank, kernels, Requirement(devices=frozenset({"cuda"})))


@pytest.mark.parametrize("num_rows", [1, 3, 64])
@pytest.mark.parametrize("k", [64, 192, 256, 512, 2048])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_q1_every_shape_works(heads: int, k: int, num_rows: int) -> None:
    """Head counts, widths and row counts that other kernels are not instantiated for."""
    case = op_case([num_rows], [num_rows + 5], rank=4, rope=2, heads=heads, page_size=16)
    rows = case.geometry.rows
    ids = torch.arange(k).expand(num_rows, -1)
    ids = ids.masked_fill(ids >= rows.kv_len[:, None], -1)
    count = rows.kv_len.clamp_max(k)
    slots = case.geometry.tables["tokens"].slots(rows.request[:, None], ids)
    out, lse = operators("torch").kernels["sparse_mla"](
        case.q_latent.data, case.q_rope.data, case.pool, slots, count, 0.5
    )
    expected = case.expected({r: list(range(int(count[r]))) for r in range(num_rows)}, 0.5)
    assert torch.allclose(out, expected[0], atol=1e-12)
    assert torch.allclose(lse, expected[1], atol=1e-12)


def test_q1_what_a_kernel_lacks_is_refused_exactly() -> None:
    narrow = KernelSet(
        "narrow",
        0,
        dict(new_kernel().kernels),
        Requirement(dtypes=frozenset({torch.bfloat16}), layouts=frozenset({"fp8_ds_mla_656"})),
    )
    need = OpNeed(dtype=torch.bfloat16, latent_layout="bf16_576")
    with pytest.raises(UnsupportedError, match="reads layouts fp8_ds_mla_656, not bf16_576"):
        bind_operators(need, [narrow], {"sparse_mla": "narrow"})
    with pytest.raises(
        UnsupportedError, match=r"computes in torch\.bfloat16, not in torch\.float32"
    ):
        bind_operators(OpNeed(), [narrow])


def test_q3_an_unfit_default_falls_back_at_start_and_says_so() -> None:
    _, choices = bind_operators(OpNeed(device="cpu"), [new_kernel(), *PORTABLE])
    for op, provider, _, rejected in explain_rows(choices):
        assert provider == "torch", op
        assert "sm100: runs on cuda, not on cpu" in rejected
    with pytest.raises(UnsupportedError, match=r"'sm100' was forced for .* these can: torch"):
        bind_operators(OpNeed(device="cpu"), [new_kernel(), *PORTABLE], "sm100")


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_q4_the_portable_path_equals_the_reference(kind: str) -> None:
    """No architecture is asked for: plain torch calls, whole model, both providers, plain maths."""
    tokens, rows = token_list(40), []
    for provider in PROVIDERS:
        bench = Bench(kind, provider=provider)
        rows.append(bench.prefill([bench.request("r", tokens)]))
    assert_same_rows(rows[0], rows[1])
    plain = plain_run(bench.config, bench.params, tokens)
    assert torch.allclose(torch.stack(list(rows[0].values())), plain.hidden, atol=1e-10)
    assert all(PORTABLE[i].supports(op, OpNeed()).is_ok for i in range(2) for op in OPERATORS)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_q5_two_ragged_sequences(provider: str) -> None:
    """50 and 7 keys in one batch: each row against its own, none past them."""
    case = op_case([2, 2], [50, 7], rank=12, rope=4, heads=8)
    bench = Bench(fields={"topk": 8})
    plan = plan_step(case.geometry, bench.config.attention_dims(), policy=NEVER)
    query = torch.cat((case.q_latent.data, case.q_rope.data), -1)
    ops = operators(provider)
    on_axis = type(case.q_latent)(case.geometry.rows, query)
    weights = type(case.q_latent)(case.geometry.rows, query[:, :, 0].contiguous())
    keys = ops.index_select(on_axis, weights, case.pool, case.geometry, plan).keys
    keys.check()
    for row, (request_id, position) in enumerate([(0, 48), (0, 49), (1, 5), (1, 6)]):
        scores = torch.full((position + 1, position + 1), 0.0, dtype=torch.float64)
        dots = (query[row] @ case.stored[request_id][: position + 1].T).clamp_min(0)
        scores[-1] = (weights.data[row][:, None] * dots).sum(0)
        expected = best_sets(scores, 8)[-1]
        assert set(keys.segments[0].ids[row].tolist()) - {-1} == expected


def test_q6_a_choice_does_not_change_with_the_mode() -> None:
    """Prefill, decode and prefill again run the kernels that were bound; named = chosen."""
    bench = Bench()
    bound = dict(bench.ops.kernels)
    one = bench.request("r", token_list(30))
    for n in (12, 1, 1, 16):
        bench.step([(one, n)])
        assert dict(bench.ops.kernels) == bound
    _, choices = bind_operators(OpNeed(), PORTABLE)
    with pytest.raises(FrozenInstanceError):
        choices[0].provider = PORTABLE[0]  # type: ignore[misc]
    asks = [request("r", prompt(30), 8)]
    found = [outputs(bug_core(attention_provider=name), asks) for name in ("auto", "torch")]
    found.append(outputs(bug_core(attention_provider="reference", num_kv_pages=32), asks))
    assert found[0] == found[1] == found[2]
    with pytest.raises(ConfigError, match="no provider is called 'fa4'"):
        bind_operators(OpNeed(), PORTABLE, "fa4")


@pytest.mark.parametrize("heads", [8, 16])
def test_q2_few_heads_are_not_padded_to_many(heads: int) -> None:
    """Their block holds 16 rows, and they get what they would get among 64."""
    tiles = pytest.importorskip("gnomon.attention.providers.triton.attention_tiles")
    for is_packed in (False, True):
        assert tiles.choose_tile(heads, 512, torch.bfloat16, is_packed).heads == 16
    case = op_case([5], [40], rank=4, rope=2, heads=64, page_size=16)
    rows = case.geometry.rows
    ids = torch.arange(40).expand(5, -1).masked_fill(torch.arange(40) >= rows.kv_len[:, None], -1)
    slots = case.geometry.tables["tokens"].slots(rows.request[:, None], ids)
    kernel = operators("torch").kernels["sparse_mla"]
    rest = case.pool, slots, rows.kv_len, 0.5
    every = kernel(case.q_latent.data, case.q_rope.data, *rest)
    few = kernel(case.q_latent.data[:, :heads], case.q_rope.data[:, :heads], *rest)
    assert torch.allclose(few[0], every[0][:, :heads], atol=1e-12)
    assert torch.allclose(few[1], every[1][:, :heads], atol=1e-12)
