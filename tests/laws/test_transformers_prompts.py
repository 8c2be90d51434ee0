"""transformers = gnomon over 40 prompts a family: logits, key lists, experts, 64 greedy tokens.

Lengths go from 1 to 600 and cross the top-k seam (index_topk 16). Ties are allowed as the laws do:
one at most in so few prompts, and with it replayed every row has to agree.
The same prompts in bfloat16 with the choices replayed, and transformers' own greedy generation,
with its own cache, for a few of them: the sequence that teacher forcing proves by induction.
"""

from __future__ import annotations

import pytest
import torch

from gnomon.models.config import Family
from gnomon.verify.context import Context
from gnomon.verify.laws import choose_laws
from gnomon.verify.laws.transformers import study
from gnomon.verify.margins import AGAINST_TRANSFORMERS
from gnomon.verify.oracle import LATENT_EPS, open_oracle
from gnomon.verify.result import LawResult, Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

NUM_PROMPTS = 40


@pytest.fixture(scope="module", params=list(Family))
def context(request: pytest.FixtureRequest) -> Context:
    return Context(VerifySettings.of(model=f"random:{request.param}", prompts=NUM_PROMPTS))


def run(context: Context, name: str) -> LawResult:
    (law,) = choose_laws(name)
    result = run_law(law, context)
    assert result.verdict is Verdict.PASS, result.failures
    return result


def test_prompts_cross_the_seam(context: Context) -> None:
    lengths = sorted(seen.trace.num_prompt for seen in study(context))
    assert len(lengths) == NUM_PROMPTS
    assert {1, 15, 16, 17, 128, 600} <= set(lengths)
    assert all(len(seen.trace.output) == 64 for seen in study(context))


def test_logits_of_every_row(context: Context) -> None:
    result = run(context, "transformers_logits")
    assert result.cases == NUM_PROMPTS
    assert 0.0 < result.worst <= AGAINST_TRANSFORMERS.logits
    rows = sum(int(seen.trace.is_computed.sum()) for seen in study(context))
    assert rows == sum(len(seen.trace.tokens) - 1 for seen in study(context))


def test_key_lists_and_experts(context: Context) -> None:
    result = run(context, "transformers_choices")
    assert result.cases == NUM_PROMPTS
    assert result.choices > 50_000


def test_greedy_tokens(context: Context) -> None:
    assert run(context, "transformers_tokens").cases == NUM_PROMPTS


def test_bfloat16(context: Context) -> None:
    assert run(context, "transformers_bfloat16").cases == context.sizes.engine_prompts


def test_greedy_generation_of_transformers(context: Context) -> None:
    traces = [seen.trace for seen in study(context)]
    short = sorted(traces, key=lambda trace: trace.num_prompt)[3:30:9]
    with open_oracle(context.source, torch.float32, is_exported=False) as oracle:
        for trace in short:
            prompt = trace.tokens[: trace.num_prompt]
            assert oracle.generate(prompt, len(trace.output)) == trace.output


def test_the_condition_for_glm_is_stated(context: Context) -> None:
    is_glm = context.config.model_type is Family.GLM_MOE_DSA
    assert ("latent_norm_eps" in run(context, "transformers_logits").detail) == is_glm
    assert LATENT_EPS == 1e-6
