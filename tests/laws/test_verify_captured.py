"""Captured decode steps and 16-bit arithmetic under the laws: they hold, and faults are seen.

On a CPU captured steps are replayed without CUDA. Each fault is one that a capture can have: a
buffer that is not refreshed, a row of padding that is not one, a step that is fed another token;
or, for arithmetic that rounds, one that replayed choices could hide: other keys, other experts,
values that are off before the cache rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gnomon.attention.layouts import PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.cli.main import build_app
from gnomon.engine.graph_buffers import GraphBuffers
from gnomon.engine.graphs import DecodeGraphs
from gnomon.errors import ConfigError
from gnomon.models.feed_forward import MixtureOfExperts
from gnomon.verify.context import Context, Handicap
from gnomon.verify.laws import choose_laws
from gnomon.verify.result import LawResult, Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

V32, GLM = "random:deepseek_v32,layers=3", "random:glm_moe_dsa,layers=4"
Break = Callable[[pytest.MonkeyPatch], None]


def run(name: str, model: str = V32, handicap: Handicap | None = None, **flags: Any) -> LawResult:
    settings = VerifySettings.of(model=model, prompts=6, max_tokens=12, max_length=90, **flags)
    (law,) = choose_laws(name)
    return run_law(law, Context(settings, handicap=handicap))


@pytest.mark.parametrize("model", [V32, GLM])
@pytest.mark.parametrize("layout", ["auto", "fp8_ds_mla_656"])
def test_captured_steps_are_eager_ones(model: str, layout: str) -> None:
    result = run("graphs", model, kv_layout=layout)
    assert result.verdict is Verdict.PASS, result.failures
    assert result.cases >= 60
    assert "steps replayed" in result.detail
    assert "replayed without CUDA" in result.detail


def test_runs_through_captured_steps_are_eager_runs() -> None:
    result = run("captured", GLM)
    assert result.verdict is Verdict.PASS, result.failures
    assert result.cases == 16
    assert run("captured", kv_layout="fp8_ds_mla_656").verdict is Verdict.NOT_APPLICABLE


def lengths_are_frozen(patch: pytest.MonkeyPatch) -> None:
    """The lengths that the capture saw stay."""
    refresh = GraphBuffers.refresh

    def broken(self: GraphBuffers, batch: Any, feed: Any = None) -> None:
        stale = self._line("kv_len", batch.bucket).clone()
        refresh(self, batch, feed)
        if int(stale.max()) > 0:
            self._line("kv_len", batch.bucket).copy_(stale)

    patch.setattr(GraphBuffers, "refresh", broken)


def another_token_is_fed(patch: pytest.MonkeyPatch) -> None:
    """The token of the row before."""
    refresh = GraphBuffers.refresh

    def broken(self: GraphBuffers, batch: Any, feed: Any = None) -> None:
        refresh(self, batch, feed)
        line = self._line("token_ids", batch.bucket)
        line.copy_(line.roll(1))

    patch.setattr(GraphBuffers, "refresh", broken)


def rows_change_places(patch: pytest.MonkeyPatch) -> None:
    """Two requests get each other's logits."""
    replay = DecodeGraphs.replay

    def broken(self: DecodeGraphs, batch: Any) -> Any:
        logits, flags = replay(self, batch)
        return logits.roll(1, 0), flags

    patch.setattr(DecodeGraphs, "replay", broken)


@pytest.mark.parametrize("fault", [lengths_are_frozen, another_token_is_fed, rows_change_places])
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("graphs", {}),
        ("captured", {}),
        ("graphs", {"kv_layout": "fp8_ds_mla_656"}),
        ("graphs", {"dtype": "bfloat16"}),
    ],
)
def test_a_fault_of_the_capture_is_seen(
    fault: Break, name: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert run(name, **flags).verdict is Verdict.FAIL


ROUGH = ("routes", "own_width", "company", "chunks", "prefixes", "preemption", "sampling")


@pytest.mark.parametrize("name", ROUGH)
def test_laws_hold_in_bfloat16(name: str) -> None:
    result = run(name, dtype="bfloat16")
    assert result.verdict is Verdict.PASS, result.failures
    assert result.worst <= 0.06


@pytest.mark.parametrize("name", ["reference", "chunks"])
def test_laws_hold_in_bfloat16_over_a_cache_that_rounds(name: str) -> None:
    result = run(name, GLM, dtype="bfloat16", kv_layout="fp8_ds_mla_656")
    assert result.verdict is Verdict.PASS, result.failures


def test_free_laws_say_why_they_do_not_apply_with_16_bits() -> None:
    for name in ("transformers_logits", "captured"):
        result = run(name, dtype="bfloat16")
        assert result.verdict is Verdict.NOT_APPLICABLE
        assert "close" in result.detail


def chunks_lose_a_row(patch: pytest.MonkeyPatch) -> None:
    """A step of several rows leaves its last one out of the cache."""
    write = PlainLayout.write

    def broken(self: PlainLayout, pool: PagedPool, slots: Tensor, values: Tensor) -> None:
        live = (slots >= 0).nonzero()[:, 0]
        slots = slots.clone()
        slots[live[1:][-1:]] = -1
        write(self, pool, slots, values)

    patch.setattr(PlainLayout, "write", broken)


def chunks_are_written_too_large(patch: pytest.MonkeyPatch) -> None:
    """Steps of few rows write a third more."""
    write = PlainLayout.write

    def broken(self: PlainLayout, pool: PagedPool, slots: Tensor, values: Tensor) -> None:
        write(self, pool, slots, values * (1.3 if len(slots) < 8 else 1.0))

    patch.setattr(PlainLayout, "write", broken)


@pytest.mark.parametrize("fault", [chunks_lose_a_row, chunks_are_written_too_large])
def test_a_fault_is_seen_in_bfloat16(fault: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    result = run("chunks", dtype="bfloat16")
    assert result.verdict is Verdict.FAIL


def test_other_experts_are_seen_though_they_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's own choice is compared, not only what follows from the given one."""
    choose = MixtureOfExperts._told

    def broken(self: MixtureOfExperts, tap: Any, routing: Any, logits: Tensor, rows: Any) -> Any:
        if 3 <= rows.num_rows < 8:  # chunks, neither whole prompts nor single tokens
            ids = routing.expert_ids
            routing = replace(routing, expert_ids=torch.where(ids > 0, ids - 1, ids))
        return choose(self, tap, routing, logits, rows)

    monkeypatch.setattr(MixtureOfExperts, "_told", broken)
    result = run("chunks", dtype="bfloat16")
    assert result.verdict is Verdict.FAIL
    assert any("experts differ" in failure for failure in result.failures), result.failures


@pytest.mark.parametrize(
    "arms",
    [("graphs=on", ""), ("graphs=on,max_prefill_chunk=7", "enable_prefix_caching=off")],
)
def test_arms_may_be_captured(arms: tuple[str, str]) -> None:
    flags = [word for arm in arms for word in ("--arm", arm)]
    small = ("--prompts", "4", "--max-tokens", "6", "--max-length", "60")
    result = CliRunner().invoke(build_app(), ["verify", V32, *flags, *small])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (("graphs=on", "graphs=on,dtype=bfloat16"), "no choice can be replayed"),
        (("graphs=on,kv_layout=fp8", "kv_layout=fp8"), "--laws graphs"),
        (("graphs=on,cp=2", ""), "leave graphs out"),
        (("enforce_eager=off", ""), "no key is called 'enforce_eager'"),
    ],
)
def test_captured_arms_that_cannot_be_compared(arms: tuple[str, str], message: str) -> None:
    flags = [word for arm in arms for word in ("--arm", arm)]
    result = CliRunner().invoke(build_app(), ["verify", V32, *flags, "--prompts", "2"])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
