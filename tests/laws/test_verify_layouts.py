"""All laws of the engine over caches that round, and one fault for each way to see one.

A rounding cache turns last bits into codes, so runs are compared with what the other one wrote.
That must hide nothing: a fault of what is written shows in the codes (one step, but too many), a
fault of where it is written or of how it is read shows in the logits.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from gnomon.attention.layouts import Fp8LatentLayout, PagedPool
from gnomon.attention.providers.torch import cache as torch_cache
from gnomon.cli.main import build_app
from gnomon.models.mla import LatentAttention
from gnomon.verify.cached_values import INDEX_QUERIES
from gnomon.verify.context import Context
from gnomon.verify.laws import LAWS, choose_laws
from gnomon.verify.result import LawResult, Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

OF_PARTS = ("operators", "layouts", "text")


def context_of(model: str, layout: str) -> Context:
    settings = VerifySettings.of(
        model=model, kv_layout=layout, prompts=6, max_tokens=18, max_length=90
    )
    return Context(settings)


@pytest.fixture(scope="module")
def published() -> Context:
    return context_of("random:deepseek_v32,layers=3", "fp8_ds_mla_656")


def run(context: Context, name: str) -> LawResult:
    (law,) = choose_laws(name)
    return run_law(law, context)


CAPTURED = ("graphs", "captured")  # test_verify_captured.py
ENGINE = [law.name for law in LAWS if law.name not in (*OF_PARTS, *CAPTURED)]


@pytest.mark.parametrize("name", ENGINE)
def test_published_layout(published: Context, name: str) -> None:
    result = run(published, name)
    if name.startswith("transformers_"):
        assert result.verdict is Verdict.NOT_APPLICABLE
        assert "fp8_ds_mla_656 rounds; the law 'reference'" in result.detail
    else:
        assert result.verdict is Verdict.PASS, result.failures
        assert result.worst <= 3e-5


@pytest.mark.parametrize(
    ("layout", "name"), [("fp8", "reference"), ("fp8", "prefixes"), ("bfloat16", "chunks")]
)
def test_other_layouts_of_shared_selections(layout: str, name: str) -> None:
    result = run(context_of("random:glm_moe_dsa,layers=4", layout), name)
    assert result.verdict is Verdict.PASS, result.failures


def test_index_queries_pass_over_the_tape_too(published: Context) -> None:
    (trace,) = published.reference([tuple(range(30))])
    assert trace.cached[INDEX_QUERIES, 0].values.shape[1:] == (16, 128)
    assert bool(trace.cached[INDEX_QUERIES, 0].values.isfinite().all())


def test_bfloat16_law_applies_where_its_cache_is_exact() -> None:
    context = context_of("random:deepseek_v32,layers=2", "bfloat16")
    assert context.cache_rounds()
    assert run(context, "transformers_bfloat16").verdict is Verdict.PASS
    assert run(context, "transformers_logits").verdict is Verdict.NOT_APPLICABLE


# ------------------------------------------------------------------ faults


def failure(name: str, layout: str = "fp8") -> str:
    result = run(context_of("random:deepseek_v32,layers=3", layout), name)
    assert result.verdict is Verdict.FAIL
    return result.failures[0]


def test_latents_that_are_a_little_off_in_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a thousand: far less than a code's step, so the logits agree; the codes do not."""
    norm = torch_cache.rms_norm

    def broken(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps) * (1.002 if len(x) < 8 else 1.0)

    monkeypatch.setattr(torch_cache, "rms_norm", broken)
    assert "codes are one step off, not" in failure("chunks")


def test_a_token_that_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Fp8LatentLayout.write

    def broken(self: Fp8LatentLayout, pool: PagedPool, slots: Tensor, values: Tensor) -> None:
        slots = slots.clone()
        slots[(slots >= 0).nonzero()[:, 0][1:][-1:]] = -1
        write(self, pool, slots, values)

    monkeypatch.setattr(Fp8LatentLayout, "write", broken)
    assert "differ" in failure("chunks")


def test_dense_context_that_is_read_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    expand = LatentAttention._expand

    def broken(self: LatentAttention, chunk: Any, step: Any) -> tuple[Tensor, Tensor]:
        key, value = expand(self, chunk, step)
        return key, value * 1.001

    monkeypatch.setattr(LatentAttention, "_expand", broken)
    assert "logits differ by" in failure("routes")


def test_the_command_says_so_by_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where laws run for so many minutes: a failure is no matter of time."""
    expand = LatentAttention._expand

    def broken(self: LatentAttention, chunk: Any, step: Any) -> tuple[Tensor, Tensor]:
        key, value = expand(self, chunk, step)
        return key, value * 1.001

    monkeypatch.setattr(LatentAttention, "_expand", broken)
    command = "verify --model random:deepseek_v32,layers=2 --kv-layout fp8_ds_mla_656 --minutes 1"
    small = "--laws full_width --prompts 1 --max-tokens 2 --max-length 40"
    result = CliRunner().invoke(build_app(), [*command.split(), *small.split()])
    assert result.exit_code == 1
    assert "full_width FAILED: " in result.output
