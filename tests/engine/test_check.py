"""Checked mode in a running engine: same tokens, counters, poison, and faults of single requests.

The oracle of the tokens is the same engine without checks; kernels that lie and NaN are put in by
hand.
"""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gnomon.attention.checked import CheckLevel
from gnomon.attention.ops.operators import Operators
from gnomon.cache.pages import PagePool
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import EngineStats
from gnomon.engine.step_checks import VARIABLE, check_level
from gnomon.errors import ConfigError, NumericsError
from gnomon.server.engine_port import EnginePort
from gnomon.server.metrics import ServerMetrics
from tests.engine.tiny_engine import VOCAB, prompt, request, run, tiny_core

LENGTHS = (90, 33, 5, 64)
MODEL = "random:deepseek_v32,layers=2,index_topk=16"  # prompts longer than K take both routes


def requests() -> list[Any]:
    return [request(f"r{n}", prompt(n, n), 10) for n in LENGTHS]


def tokens(core: EngineCore) -> dict[str, list[int]]:
    found = run(core, requests())
    return {
        name: [t for delta in deltas for t in delta.token_ids] for name, deltas in found.items()
    }


@pytest.fixture(scope="module")
def unchecked() -> dict[str, list[int]]:
    return tokens(tiny_core(model=MODEL, check="off"))


@pytest.mark.parametrize("kind", ["plain", "fp8", "glm", "deterministic", "never dense"])
def test_full_checks_find_nothing_and_change_no_token(kind: str) -> None:
    flags: dict[str, Any] = {"model": MODEL, "max_prefill_chunk": 24, "num_kv_pages": 20}
    if kind == "glm":
        flags["model"] = MODEL.replace("deepseek_v32,layers=2", "glm_moe_dsa")
    if kind == "deterministic":
        flags["deterministic"] = True
    if kind == "never dense":
        flags["dense_route"] = "never"
    if kind == "fp8":
        latent = "kv_lora_rank=512,qk_rope_head_dim=64,index_head_dim=128"
        flags |= {"model": f"{MODEL},{latent}", "kv_layout": "fp8", "dtype": "bfloat16"}
    plain, checked = (tiny_core(**flags, check=level) for level in ("off", "full"))
    assert tokens(checked) == tokens(plain)
    stats = checked.stats()
    assert stats.checks > 20 * stats.num_steps
    assert stats.check_violations == 0
    assert plain.stats().checks == 0


def test_sampled_checks_come_in_turn(unchecked: dict[str, list[int]]) -> None:
    core = tiny_core(model=MODEL, check="sampled")
    assert tokens(core) == unchecked
    first = core.stats().checks
    assert 0 < first < 40  # layer 0 of the first step
    while core.stats().num_steps <= 128 - 10:  # each round takes 10 steps
        tokens(core)
    assert core.stats().num_steps > 100
    assert core.stats().checks == first
    tokens(core)
    tokens(core)  # step 128 was among them
    assert first < core.stats().checks < 80
    assert core.stats().check_violations == 0


def test_the_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_level(None, {}) == (CheckLevel.OFF, "default")
    assert check_level(None, {VARIABLE: ""}) == (CheckLevel.OFF, "default")
    assert check_level(None, {VARIABLE: "full"}) == (CheckLevel.FULL, "environment")
    assert check_level("off", {VARIABLE: "full"}) == (CheckLevel.OFF, "flag")
    with pytest.raises(ConfigError, match=r"GNOMON_CHECK is 'ful'.*Did you mean 'full'"):
        check_level(None, {VARIABLE: "ful"})
    with pytest.raises(ConfigError, match=r"check is 'some'.*off, sampled, full"):
        EngineConfig.of(check="some")
    monkeypatch.setenv(VARIABLE, "sampled")
    assert tiny_core().info.resolved["check"][:2] == ("sampled", "environment")
    assert tiny_core(check="off").info.resolved["check"][:2] == ("off", "flag")


def with_kernel(core: EngineCore, op: str, kernel: Any) -> None:
    """Put a kernel in the place of an engine's own, inside its checks."""
    checker = core._parts.checker
    assert checker is not None
    ops = checker._checked
    inner = ops.kernels[op]._kernel
    ops.kernels[op]._kernel = lambda *arguments, **out: kernel(inner, *arguments, **out)
    assert isinstance(ops, Operators)


def test_a_wrong_row_fails_its_request_alone(
    unchecked: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """One row of the prefill, of the request with 64 tokens, gets its ids in the wrong order."""
    core = tiny_core(model=MODEL, check="full")

    def swapped(inner: Any, *arguments: Any) -> Any:
        right = inner(*arguments)
        row = int(arguments[1].argmax())
        if int(arguments[1][row]) == 64:  # the last row of its prompt
            right.ids[row] = right.ids[row].flip(0)
        return right

    with_kernel(core, "topk", swapped)
    names = [one for one in requests() if one.request_id != "r90"]
    with caplog.at_level(logging.ERROR):
        found = run(core, names)
    assert found["r64"][-1].finish_reason == "error"
    error = str(found["r64"][-1].error)
    assert "topk of provider 'torch' in layer 0" in error
    assert "'r64', position 63" in error
    assert error in caplog.text
    for name in ("r33", "r5"):
        assert [t for delta in found[name] for t in delta.token_ids] == unchecked[name]
    assert core.stats().check_violations == 1
    core.check_integrity()


def test_a_kernel_that_writes_elsewhere_ends_the_step() -> None:
    core = tiny_core(model=MODEL, check="full")

    def astray(inner: Any, *arguments: Any) -> Any:
        inner(*arguments)
        arguments[4].typed()[0] = 1.0

    with_kernel(core, "latent_write", astray)
    core.add(requests())
    with pytest.raises(NumericsError, match=r"latent_write.*no other slot is written") as caught:
        core.step()
    assert "in step 1" in caught.value.__notes__
    assert not core.has_work


@pytest.mark.parametrize("check", ["off", "full"])
def test_a_hidden_state_that_is_not_finite_fails_its_request_alone(check: str) -> None:
    """Infinity in an embedding: no index score is NaN, and no token is sampled from that row."""
    core = tiny_core(check=check, max_prefill_chunk=16)
    alone = run(tiny_core(), [request("good", prompt(33, 33))])
    model = core._parts.runner._model
    model.embedding[VOCAB - 1] = math.inf
    bad = prompt(60, 300)
    bad[3] = VOCAB - 1
    found = run(core, [request("bad", bad), request("good", prompt(33, 33))])
    assert found["bad"][-1].finish_reason == "error"
    assert len(found["bad"]) == 1
    expected, kept = ([d.token_ids for d in deltas] for deltas in (alone["good"], found["good"]))
    assert kept == expected


def test_free_pages_hold_nan_in_full_mode() -> None:
    core = tiny_core(check="full", enable_prefix_caching=False, num_kv_pages=16)
    pool = next(iter(core._parts.cache.pools.values())).typed_pages()
    run(core, [request("one", prompt(40, 1), 3)])
    held = (~pool.isnan().flatten(1).any(1)).nonzero()[:, 0].tolist()
    used = pool.isnan().flatten(1).all(1)
    assert int(used.sum()) == 3  # 43 tokens in pages of 16, all given back
    assert 0 in held  # the null page is nobody's to poison
    core.add([request("two", prompt(20, 2), 3)])
    core.step()
    partly = pool.isnan().flatten(1).any(1) & ~pool.isnan().flatten(1).all(1)
    assert int(partly.sum()) == 1  # 20 tokens: one page full, one with 12 slots never written


def test_the_page_pool_tells_of_pages_that_change_hands() -> None:
    pool = PagePool({"tokens": (6, 4), "wide": (4, 8)}, "")
    told: list[tuple[str, list[int]]] = []
    pool.on_change_of_hands = lambda group, pages: told.append((group, list(pages)))
    spans = pool.allocate(2)
    assert spans is not None
    given = [(name, list(s.pages[g])) for s in spans for g, name in enumerate(pool.groups)]
    assert told == given
    told.clear()
    pool.begin_step(1)
    pool.release(spans)
    assert told == []  # a step still names them
    pool.retire_step(1)
    assert sorted(told) == sorted(given)
    told.clear()
    (span,) = pool.allocate(1) or []
    pool.register(span, b"digest", None)
    told.clear()
    pool.release([span])
    assert told == []  # it may be found again
    pool.evict_all()
    assert {name for name, _ in told} == {"tokens", "wide"}


def test_counters_are_on_the_metrics_page() -> None:
    stats = EngineStats(checks=7, check_violations=2)
    port = SimpleNamespace(stats=lambda: stats, is_healthy=True)
    page = ServerMetrics(cast(EnginePort, port)).page().decode().splitlines()
    assert "gnomon_checks_total 7.0" in page
    assert "gnomon_check_violations_total 2.0" in page


def test_counters_reach_the_stats_only_when_checks_run() -> None:
    core = tiny_core()
    run(core, [request("one", prompt(5, 1), 2)])
    assert (core.stats().checks, core.stats().check_violations) == (0, 0)
    assert core._parts.checker is None
    assert torch.get_deterministic_debug_mode() == 0
