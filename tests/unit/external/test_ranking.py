"""Measured orders of providers, as data and out of results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.attention.by_rows import OPERATORS_BY_ROWS, choose_by_rows
from gnomon.attention.dispatch import (
    OPERATORS,
    KernelSet,
    OpNeed,
    Requirement,
    bind_operators,
    choose,
)
from gnomon.attention.ops.operators import Operators
from gnomon.attention.providers.external.deepgemm import BLOCK_ROWS
from gnomon.attention.providers.ranking import MEASURED, Measured, fastest, row_classes, table_of
from gnomon.attention.routes import AttentionDims
from gnomon.engine.operators import _by_rows

NEED = OpNeed(
    device="cuda",
    dtype=torch.bfloat16,
    dims=AttentionDims(16, 512, 128, 64, 128, 2048, 64, 128),
    latent_layout="bf16_576",
    index_layout="index_k_132",
    phase="decode",
    capability=(9, 0),
)
TABLE = (
    Measured("sparse_mla", "decode", "bf16_576", 16, ("b", "a"), "few heads"),
    Measured("sparse_mla", "decode", "bf16_576", 128, ("a", "b"), "many heads"),
    Measured("index_scores", "decode", None, 64, ("c",), "scores"),
)


def heads(number: int) -> OpNeed:
    assert NEED.dims is not None
    return replace(NEED, dims=replace(NEED.dims, num_heads=number))


@pytest.mark.parametrize(
    ("number", "source"),
    [(8, "few heads"), (20, "few heads"), (64, "many heads"), (128, "many heads")],
)
def test_the_nearest_measured_number_of_heads_decides(number: int, source: str) -> None:
    assert fastest("sparse_mla", heads(number), TABLE)[1] == source


@pytest.mark.parametrize(
    "need",
    [
        replace(NEED, phase="prefill"),
        replace(NEED, phase=None),
        replace(NEED, capability=(8, 0)),
        replace(NEED, capability=None),
        replace(NEED, latent_layout="fp8_ds_mla_656"),
    ],
)
def test_a_measurement_holds_for_its_phase_gpu_and_layout_alone(need: OpNeed) -> None:
    assert fastest("sparse_mla", need, TABLE) == ((), "")


def test_a_measurement_without_a_layout_holds_for_all() -> None:
    assert fastest("index_scores", NEED, TABLE) == (("c",), "scores")
    assert fastest("topk", NEED, TABLE) == ((), "")


def provider(name: str, rank: int, requirement: Requirement | None = None) -> KernelSet:
    return KernelSet(name, rank, {"sparse_mla": print}, requirement or Requirement())


def test_measured_orders_go_before_ranks_and_ability_before_both() -> None:
    ranked = (provider("a", 1), provider("b", 2), provider("z", 0))

    def by_table(op: str, need: OpNeed) -> tuple[tuple[str, ...], str]:
        return fastest(op, need, TABLE)

    choice = choose("sparse_mla", NEED, ranked, ranking=by_table)
    assert (choice.provider.name, choice.reason) == ("b", "few heads")
    assert choice.rejected == (("a", "ranked after b"), ("z", "ranked after b"))
    choice = choose("sparse_mla", replace(NEED, phase="prefill"), ranked, ranking=by_table)
    assert (choice.provider.name, choice.reason) == ("z", "first in rank of those that can")
    cannot = (provider("b", 0, Requirement(devices=frozenset({"cpu"}))), provider("z", 1))
    choice = choose("sparse_mla", NEED, cannot, ranking=by_table)
    assert (choice.provider.name, choice.reason) == ("z", "first in rank of those that can")
    assert choose("sparse_mla", NEED, ranked, "z", by_table).reason == "forced"


def test_a_provider_behind_one_that_cannot_is_not_called_the_fastest() -> None:
    for missing in ((provider("b", 0, Requirement(devices=frozenset({"cpu"}))),), ()):
        choice = choose(
            "sparse_mla",
            NEED,
            (*missing, provider("a", 1)),
            ranking=lambda op, need: fastest(op, need, TABLE),
        )
        assert choice.provider.name == "a"
        assert choice.reason == "next after b, which cannot serve here"


ROWS = (
    Measured("sparse_mla", "decode", "bf16_576", 16, ("a", "b"), "few", num_rows=4),
    Measured("sparse_mla", "decode", "bf16_576", 16, ("a", "b"), "some", num_rows=16),
    Measured("sparse_mla", "decode", "bf16_576", 16, ("b", "a"), "many", num_rows=64),
)


def by_rows(op: str, need: OpNeed) -> tuple[tuple[str, ...], str]:
    return fastest(op, need, ROWS)


@pytest.mark.parametrize(
    ("num_rows", "source"),
    [(1, "few"), (7, "few"), (9, "some"), (31, "some"), (33, "many"), (None, "many")],
)
def test_the_nearest_measured_number_of_rows_decides(num_rows: int | None, source: str) -> None:
    assert by_rows("sparse_mla", replace(NEED, num_rows=num_rows))[1] == source


def test_a_kernel_by_rows_hands_calls_on() -> None:
    classes = row_classes("sparse_mla", NEED, ROWS)
    assert classes == (4, 16, 64)
    providers = tuple(
        KernelSet(name, 1, {"sparse_mla": lambda x, name=name: (name, len(x))}) for name in "ab"
    )
    found = choose_by_rows("sparse_mla", NEED, providers, by_rows, classes)
    assert found is not None
    choice, kernel = found
    assert choice.reason == "up to 32 rows a, then b: many"
    called = [kernel(torch.zeros(n, 1)) for n in (0, 1, 32, 33, 500)]
    assert called == [("a", 0), ("a", 1), ("a", 32), ("b", 33), ("b", 500)]
    assert choose_by_rows("sparse_mla", NEED, providers[:1], by_rows, classes) is None
    assert choose_by_rows("sparse_mla", NEED, providers, by_rows, ()) is None


def test_linears_of_long_prefills_are_deepgemms_where_it_is() -> None:
    """From the rows on of which it takes whole blocks; never in decode, where it would compile."""
    providers = tuple(
        KernelSet(name, rank, {"linear_fp8": lambda *_, name=name: name})
        for rank, name in enumerate(("triton", "deepgemm"))
    )
    need = replace(NEED, phase="prefill")
    classes = row_classes("linear_fp8", need)
    found = choose_by_rows("linear_fp8", need, providers, fastest, classes)
    assert found is not None
    called = [found[1](torch.zeros(n, 1)) for n in (1, BLOCK_ROWS - 1, BLOCK_ROWS, 16384)]
    assert called == ["triton", "triton", "deepgemm", "deepgemm"]
    assert choose_by_rows("linear_fp8", need, providers[:1], fastest, classes) is None
    assert fastest("linear_fp8", NEED)[0][0] == "triton"


def test_experts_of_long_prefills_are_deepgemms_and_of_short_ones_tritons() -> None:
    """Their first argument is codes and scales; rows are the codes'."""
    providers = tuple(
        KernelSet(name, rank, dict.fromkeys(OPERATORS, lambda *_, name=name: name))
        for rank, name in enumerate(("triton", "deepgemm"))
    )
    need = replace(NEED, phase="prefill")
    ops, choices = _by_rows(need, providers, {}, *bind_operators(need, providers, {}, fastest))
    rows = (1, 300, 2048, 4096, 8192)
    called = [ops.kernels["moe_fp8"]((torch.zeros(n, 4), torch.zeros(n, 1))) for n in rows]
    assert called == ["triton", "triton", "triton", "deepgemm", "deepgemm"]
    words = {choice.op: choice.reason for choice in choices}
    assert words["moe_fp8"].startswith("up to 2896 rows triton, then deepgemm")


def test_all_that_was_measured_by_rows_is_bound_by_rows() -> None:
    assert {one.op for one in MEASURED if one.num_rows} <= set(OPERATORS_BY_ROWS)


def row(name: str, microseconds: float, shape: str = "", num_heads: int = 16) -> dict[str, object]:
    held = {"op": "sparse_mla", "phase": "decode", "layout": "bf16_576", "num_heads": num_heads}
    return {**held, "provider": name, "us": microseconds, "shape": shape}


def test_results_become_a_table() -> None:
    rows = [row("slow", 9.0, "b1"), row("quick", 2.0, "b1"), row("slow", 9.0, "b64")]
    rows += [row("quick", 30.0, "b64"), row("partial", 0.1, "b1"), row("only", 5.0, num_heads=64)]
    # Geometric means: 9 and 7.7; an arithmetic one would prefer the other.
    assert table_of(rows, "a file") == (
        Measured("sparse_mla", "decode", "bf16_576", 16, ("quick", "slow"), "a file"),
        Measured("sparse_mla", "decode", "bf16_576", 64, ("only",), "a file"),
    )


def test_the_table_names_each_class_once() -> None:
    keys = [(m.op, m.phase, m.layout, m.num_heads, m.num_rows, m.capability) for m in MEASURED]
    assert len(set(keys)) == len(keys)
    assert all(m.order and m.source for m in MEASURED)


def test_a_fusion_does_not_outlive_the_choice_by_rows() -> None:
    """Guards: a decision is made once. A fusion of the provider for few rows would take all."""
    need = replace(NEED, phase="prefill")
    providers = tuple(
        KernelSet(name, rank, {"linear_fp8": lambda *_: None})
        for rank, name in enumerate(("triton", "deepgemm"))
    )
    kernels = dict.fromkeys(OPERATORS, lambda *_: None)
    fusions = dict.fromkeys(("linear_fp8_parts", "add_rms_norm"), lambda *_: None)
    forced = {op: "triton" for op in OPERATORS_BY_ROWS if op != "linear_fp8"}
    for also, kept in (({}, ["add_rms_norm"]), ({"linear_fp8": "triton"}, list(fusions))):
        bound, _ = _by_rows(need, providers, forced | also, Operators(kernels, {}, fusions), ())
        assert list(bound.fusions) == kept
