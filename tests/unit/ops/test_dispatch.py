"""Choosing providers: rank, requirements, forced names, and errors that say what would work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.attention.dispatch import (
    OPERATORS,
    KernelSet,
    OpNeed,
    Requirement,
    bind_operators,
    choose,
    explain_rows,
)
from gnomon.attention.providers import builtin_providers
from gnomon.attention.routes import AttentionDims
from gnomon.errors import ConfigError, UnsupportedError


def kernel(name: str, rank: int, requirement: Requirement | None = None) -> KernelSet:
    return KernelSet(name, rank, {"topk": lambda: name}, requirement or Requirement())


GPU_ONLY = Requirement(devices=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16}))


def test_lowest_rank_that_can_wins_and_the_others_say_why_not() -> None:
    slow, fast = kernel("slow", 9), kernel("fast", 1, GPU_ONLY)
    choice = choose("topk", OpNeed(), (slow, fast))
    assert choice.provider is slow
    assert choice.rejected == (("fast", "runs on cuda, not on cpu"),)
    on_gpu = OpNeed(device="cuda", dtype=torch.bfloat16)
    choice = choose("topk", on_gpu, (slow, fast))
    assert choice.provider is fast
    assert choice.rejected == (("slow", "ranked after fast"),)


def test_choice_does_not_hang_on_the_order_of_providers() -> None:
    twins = (kernel("b", 3), kernel("a", 3), kernel("c", 4))
    names = {choose("topk", OpNeed(), order).provider.name for order in (twins, twins[::-1])}
    assert names == {"a"}


@pytest.mark.parametrize(
    ("requirement", "need", "reason"),
    [
        (GPU_ONLY, OpNeed(device="cuda"), "computes in torch.bfloat16, not in torch.float32"),
        (
            Requirement(layouts=frozenset({"fp8_ds_mla_656"})),
            OpNeed(latent_layout="bf16_576"),
            "reads layouts fp8_ds_mla_656, not bf16_576",
        ),
        (Requirement(), OpNeed(is_graph=True), "cannot run inside a captured graph"),
        (
            Requirement(fixed_dtypes=frozenset({torch.float32})),
            OpNeed(is_deterministic=True, dtype=torch.bfloat16),
            "has row bits that hang on the batch in torch.bfloat16",
        ),
    ],
)
def test_each_requirement_refuses_with_its_reason(
    requirement: Requirement, need: OpNeed, reason: str
) -> None:
    provider = KernelSet("one", 1, {"sparse_mla": print}, requirement)
    assert provider.supports("sparse_mla", need).reason == reason
    with pytest.raises(UnsupportedError, match="one: " + reason.split(",")[0]):
        choose("sparse_mla", need, (provider,))


def test_deterministic_needs_get_the_kernels_with_fixed_bits() -> None:
    requirement = Requirement(fixed_dtypes=frozenset({torch.float32}))
    kernels = dict.fromkeys(OPERATORS, max)
    provider = KernelSet("two", 1, kernels, requirement, fixed={"moe": min})
    fast, _ = bind_operators(OpNeed(), (provider,))
    fixed, _ = bind_operators(OpNeed(is_deterministic=True), (provider,))
    assert fast.kernels["moe"] is max
    assert fixed.kernels["moe"] is min
    assert fixed.kernels["topk"] is max


def test_layout_of_index_keys_does_not_bind_latent_operators() -> None:
    need = OpNeed(latent_layout="a", index_layout="b")
    layouts = {op: need.layout_of(op) for op in OPERATORS}
    assert layouts["sparse_mla"] == layouts["latent_write"] == "a"
    assert layouts["index_scores_paged"] == layouts["index_prepare"] == "b"
    assert layouts["moe"] is None


def test_own_requirement_of_an_operator_replaces_the_providers() -> None:
    provider = KernelSet("one", 1, {"topk": print, "moe": print}, GPU_ONLY, {"moe": Requirement()})
    assert provider.supports("moe", OpNeed()).is_ok
    assert not provider.supports("topk", OpNeed()).is_ok
    assert provider.supports("rope", OpNeed()).reason == "has no kernel for rope"


def test_forced_provider_that_cannot_names_those_that_can() -> None:
    with pytest.raises(UnsupportedError, match=r"forced for topk but .*these can: slow"):
        choose("topk", OpNeed(), (kernel("slow", 9), kernel("fast", 1, GPU_ONLY)), "fast")
    with pytest.raises(ConfigError, match="no provider is called 'fats'; at hand are: fast, slow"):
        choose("topk", OpNeed(), (kernel("slow", 9), kernel("fast", 1)), "fats")
    forced = choose("topk", OpNeed(), (kernel("slow", 9), kernel("fast", 1)), "slow")
    assert (forced.provider.name, forced.reason) == ("slow", "forced")


def test_unknown_operators_are_refused() -> None:
    with pytest.raises(ConfigError, match="no operator is called 'topq'"):
        choose("topq", OpNeed(), builtin_providers())
    with pytest.raises(ConfigError, match="no operator is called 'topq'"):
        bind_operators(OpNeed(), builtin_providers(), {"topq": "torch"})


def test_binding_prefers_torch_and_can_mix() -> None:
    _, choices = bind_operators(OpNeed(), builtin_providers())
    assert {choice.provider.name for choice in choices} == {"torch"}
    operators, choices = bind_operators(OpNeed(), builtin_providers(), {"topk": "reference"})
    chosen = {choice.op: choice.provider.name for choice in choices}
    assert chosen.pop("topk") == "reference"
    assert set(chosen.values()) == {"torch"}
    assert set(operators.kernels) == set(OPERATORS)
    table = explain_rows(choices)
    assert [row[0] for row in table] == list(OPERATORS)
    assert ("topk", "reference", "forced", "torch: reference was forced") in table


def test_what_no_provider_can_is_said_in_words() -> None:
    need = OpNeed("cuda", torch.bfloat16, latent_layout="bf16_576", phase="decode", is_graph=True)
    words = r"topk for decode steps on cuda in torch\.bfloat16, bf16_576, in a captured graph: one"
    with pytest.raises(UnsupportedError, match=words):
        choose("topk", need, (kernel("one", 1),))


def test_explain_names_who_attends_an_unpacked_context() -> None:
    """Many rows over packed latents: another choice than that for the packed pool itself."""
    layouts = {"packed": "fp8_ds_mla_656", "plain": "bf16_576"}
    every = KernelSet("every", 9, dict.fromkeys(OPERATORS, max))
    attend = [
        KernelSet(name, 1, {"sparse_mla": min}, Requirement(layouts=frozenset({layout})))
        for name, layout in layouts.items()
    ]
    dims = AttentionDims(16, 512, 128, 64, 128, 2048, 64, 128)
    need = OpNeed("cuda", torch.bfloat16, dims, "fp8_ds_mla_656", "index_k_132", phase="prefill")
    bound, choices = bind_operators(need, (every, *attend))
    assert bound.unpacked is not None
    table = {row[0]: row for row in explain_rows(choices)}
    assert len(table) == len(OPERATORS) + 1
    assert table["sparse_mla"][1] == "packed"
    other = table["sparse_mla of many rows, context unpacked"]
    assert other[1] == "plain"
    assert "packed: reads layouts fp8_ds_mla_656, not bf16_576" in other[3]
    _, choices = bind_operators(replace(need, phase="decode"), (every, *attend))
    assert len(explain_rows(choices)) == len(OPERATORS)


def test_builtin_providers_own_no_scratch_and_need_no_schedule() -> None:
    for provider in builtin_providers():
        assert provider.scratch_bytes("moe", OpNeed()) == 0
        assert provider.supports("moe", OpNeed(dtype=torch.bfloat16)).is_ok


def test_a_variant_is_asked_first_and_may_leave_the_choice_to_the_others() -> None:
    def by_layout(need: OpNeed) -> object:
        return "for fp8" if need.index_layout == "index_k_132" else None

    provider = KernelSet(
        "p", 1, {"topk": "usual"}, fixed={"topk": "fixed"}, variants={"topk": by_layout}
    )
    assert provider.kernel("topk") == provider.kernel("topk", OpNeed()) == "usual"
    assert provider.kernel("topk", OpNeed(is_deterministic=True)) == "fixed"
    for is_fixed in (False, True):
        need = OpNeed(index_layout="index_k_132", is_deterministic=is_fixed)
        assert provider.kernel("topk", need) == "for fp8"
