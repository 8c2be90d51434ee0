"""Operators by phase: flags that force a backend, what is refused, and what explain shows."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gnomon.attention.dispatch import OPERATORS, KernelSet, OpNeed, Requirement
from gnomon.attention.ops.operators import Operators
from gnomon.cli.main import build_app
from gnomon.engine.assembly import put_together, survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.engine.operators import BoundOperators, bind_phases, operators_for
from gnomon.errors import ConfigError, UnsupportedError
from gnomon.models.sources import open_model
from tests.engine.planted import planted_core
from tests.engine.tiny_engine import MODEL, VOCAB, outputs, prompt, request

CAN_CAPTURE = Requirement(can_capture=True)


def every(name: str, rank: int, requirement: Requirement = CAN_CAPTURE) -> KernelSet:
    """A provider of all operators whose kernels are told apart by their name."""
    return KernelSet(name, rank, {op: f"{name}.{op}".format for op in OPERATORS}, requirement)


def narrow(name: str, *ops: str, requirement: Requirement = CAN_CAPTURE) -> KernelSet:
    return KernelSet(name, 1, {op: f"{name}.{op}".format for op in ops}, requirement)


PLAIN = every("plain", 50)


def names(bound: BoundOperators) -> tuple[dict[str, str], dict[str, str]]:
    usual, decode = bound.usual, bound.decode or bound.usual
    return dict(usual.providers), dict(decode.providers)


def bind(*providers: KernelSet, has_graphs: bool = False, **flags: Any) -> BoundOperators:
    return bind_phases(EngineConfig.of(**flags), OpNeed(), providers, has_graphs)


def test_one_set_serves_all_phases_where_nothing_differs() -> None:
    bound = bind(PLAIN)
    assert bound.decode is None
    assert bound.graph is None
    assert [row[0] for row in bound.rows()] == list(OPERATORS)


def test_phases_take_their_own_providers_and_say_so() -> None:
    bound = bind(
        PLAIN, narrow("quick", "sparse_mla", requirement=Requirement(phases=frozenset({"decode"})))
    )
    usual, decode = names(bound)
    assert (usual["sparse_mla"], decode["sparse_mla"]) == ("plain", "quick")
    assert usual["topk"] == decode["topk"] == "plain"
    rows = {row[0]: row for row in bound.rows()}
    assert rows["sparse_mla, prefill"][3] == "quick: is for decode steps, not for prefill"
    assert rows["sparse_mla, decode"][1] == "quick"
    assert rows["topk"][1] == "plain"


def test_the_plan_decides_which_set_a_step_runs_with() -> None:
    bound = bind(
        PLAIN, narrow("quick", "sparse_mla", requirement=Requirement(phases=frozenset({"decode"})))
    )
    decoding, mixed = (SimpleNamespace(graph_key=key) for key in (object(), None))
    assert bound.decode is not None
    assert operators_for(decoding, bound.usual, bound.decode) is bound.decode
    assert operators_for(mixed, bound.usual, bound.decode) is bound.usual
    assert operators_for(decoding, bound.usual, None) is bound.usual


def test_graphs_take_what_can_be_captured() -> None:
    eager = narrow("eager", "sparse_mla", requirement=Requirement())
    usual, decode = names(bound := bind(PLAIN, eager, has_graphs=True))
    assert (usual["sparse_mla"], decode["sparse_mla"]) == ("eager", "plain")
    assert bound.graph is bound.decode
    bound = bind(every("uncaptured", 1, Requirement()), has_graphs=True)
    assert bound.graph is None, "decode runs eagerly where nothing can be captured"


def test_a_backend_flag_forces_its_operators_in_its_phase() -> None:
    ops = ("sparse_mla", "dense_mha", "index_scores_paged", "moe", "linear_fp8")
    swift = narrow("swift", *ops)
    last = KernelSet("swift", 99, swift.kernels, CAN_CAPTURE)  # never taken by itself
    usual, decode = names(bind(PLAIN, last, prefill_backend="swift"))
    assert [op for op in OPERATORS if usual[op] == "swift"] == ["sparse_mla", "dense_mha"]
    assert "swift" not in decode.values()
    usual, decode = names(bind(PLAIN, last, decode_backend="swift"))
    assert "swift" not in usual.values()
    assert [op for op in OPERATORS if decode[op] == "swift"] == ["sparse_mla"]
    flags = {
        "index_backend": "index_scores_paged",
        "moe_backend": "moe",
        "linear_backend": "linear_fp8",
    }
    for flag, op in flags.items():
        for bound in names(bind(PLAIN, last, **{flag: "swift"})):
            assert [one for one in OPERATORS if bound[one] == "swift"] == [op]


def test_a_backend_flag_wins_over_the_provider_of_all() -> None:
    other = every("other", 60)
    _, decode = names(bind(PLAIN, other, attention_provider="other", decode_backend="plain"))
    assert decode.pop("sparse_mla") == "plain"
    assert set(decode.values()) == {"other"}


def test_a_backend_that_cannot_be_meant_is_refused() -> None:
    swift = narrow("swift", "sparse_mla")
    with pytest.raises(ConfigError, match=r"decode_backend is 'swfit'.*there are: plain, swift"):
        bind(PLAIN, swift, decode_backend="swfit")
    with pytest.raises(ConfigError, match=r"index_backend is 'swift': it has none.*plain"):
        bind(PLAIN, swift, index_backend="swift")
    on_gpu = narrow("swift", "sparse_mla", requirement=Requirement(devices=frozenset({"cuda"})))
    with pytest.raises(
        UnsupportedError, match=r"runs on cuda, not on cpu; these can: plain.*decode_backend swift"
    ):
        bind(PLAIN, on_gpu, decode_backend="swift")


def test_a_backend_of_fp8_weights_is_refused_where_there_are_none() -> None:
    """It would force nothing: accepted and without effect."""
    swift = narrow("swift", "linear_fp8", "moe_fp8")

    def bound(has_fp8: bool, **flags: str) -> dict[str, str]:
        config = EngineConfig.of(**flags)
        return names(bind_phases(config, OpNeed(), (PLAIN, swift), False, has_fp8))[0]

    for flag in ("linear_backend", "moe_backend"):
        bound(True, **{flag: "swift"})
        with pytest.raises(ConfigError, match=f"{flag} is 'swift': it multiplies FP8 weights"):
            bound(False, **{flag: "swift"})
    with pytest.raises(ConfigError, match=r"linear_backend is 'plain'.*leave linear_backend out"):
        bound(False, linear_backend="plain")
    with pytest.raises(ConfigError, match="linear_backend is 'palin': there is no such provider"):
        bound(False, linear_backend="palin")
    assert bound(False, moe_backend="plain")["moe"] == "plain"
    with pytest.raises(ConfigError, match="choose one of plain, or leave moe_backend out"):
        bound(False, moe_backend="swift")


def test_an_impossible_backend_is_refused_before_weights_are_read() -> None:
    """By the survey, which loads nothing."""
    flags = {"model": "random:deepseek_v32", "decode_backend": "flashmla"}
    with pytest.raises(UnsupportedError, match=r"runs on cuda, not on cpu; these can: torch"):
        survey(EngineConfig.of(**flags), 64)
    with pytest.raises(ConfigError, match="prefill_backend is 'flash'"):
        survey(EngineConfig.of(model="random:deepseek_v32", prefill_backend="flash"), 64)
    with pytest.raises(UnsupportedError, match=r"'triton' was forced .*torch finds none.*given"):
        survey(EngineConfig.of(model="random:deepseek_v32", decode_backend="triton"), 64)
    with pytest.raises(ConfigError, match=r"linear_backend is 'torch'.*leave linear_backend out"):
        survey(EngineConfig.of(model="random:deepseek_v32", linear_backend="torch"), 64)
    with pytest.raises(ConfigError, match="provider_path"):
        survey(EngineConfig.of(model="random:deepseek_v32", provider_path="/nowhere"), 64)


def explained(*arguments: str) -> dict[str, dict[str, str]]:
    given = ["explain", "random:deepseek_v32", "--num-kv-pages", "64", "--json", *arguments]
    result = CliRunner().invoke(build_app(), given)
    assert result.exit_code == 0, result.output
    return {row["operator"]: row for row in json.loads(result.output)["operators"]}


def test_explain_says_who_serves_and_why_not_the_others() -> None:
    rows = explained()
    assert "triton: needs a CUDA GPU" in rows["topk"]["rejected"]
    assert "flashmla: runs on cuda, not on cpu" in rows["sparse_mla"]["rejected"]
    assert "fa3: runs on cuda, not on cpu" in rows["dense_mha"]["rejected"]
    assert "deepgemm: runs on cuda, not on cpu" in rows["index_scores"]["rejected"]
    assert "flashmla" not in rows["topk"]["rejected"], "it has no business there"
    rows = explained("--decode-backend", "reference")
    assert rows["sparse_mla, decode"]["provider"] == "reference"
    assert rows["sparse_mla, decode"]["reason"] == "forced"
    assert rows["sparse_mla, prefill"]["provider"] == "torch"


def test_steps_run_with_the_operators_of_their_phase() -> None:
    """Through the engine, checked mode included: a prompt and then four tokens."""
    found = survey(
        EngineConfig.of(model=MODEL, dtype="float32", num_kv_pages=64, check="full"), VOCAB
    )
    calls: list[tuple[str, int]] = []

    def counting(phase: str) -> Operators:
        def sparse_mla(*arguments: Any) -> Any:
            calls.append((phase, len(arguments[0])))
            return found.ops.kernels["sparse_mla"](*arguments)

        return Operators({**found.ops.kernels, "sparse_mla": sparse_mla}, {"sparse_mla": phase})

    by_phase = replace(found, ops=counting("prefill"), decode_ops=counting("decode"))
    loaded = open_model(found.source, torch.float32, torch.device("cpu"), None, 64)
    core = EngineCore(put_together(by_phase, loaded))
    expected = outputs(planted_core({}), [request("a", prompt(9, 1), 5)])
    assert outputs(core, [request("a", prompt(9, 1), 5)]) == expected
    assert {phase for phase, rows in calls if rows == 1} == {"decode"}
    assert {phase for phase, rows in calls if rows > 1} <= {"prefill"}


def test_parts_of_prefill_are_captured_where_their_operators_can_be() -> None:
    attends = narrow("outside", "sparse_mla", "topk", requirement=Requirement())
    bound = bind(PLAIN, attends, has_graphs=True)
    assert bound.segments is bound.usual  # attention runs between the graphs
    assert bound.graph is not None  # and decode takes what can be captured
    assert bind(PLAIN).segments is None
    uncaptured = narrow("uncaptured", "moe", requirement=Requirement())
    assert bind(PLAIN, uncaptured, has_graphs=True).segments is None
    with pytest.raises(UnsupportedError, match="moe by uncaptured cannot run inside a captured"):
        bind(PLAIN, uncaptured, has_graphs=True, max_captured_prefill_tokens=512)
    off = bind(PLAIN, uncaptured, has_graphs=True, max_captured_prefill_tokens=0)
    assert off.segments is None
