"""The laws of the engine, for both families: company, chunks, padding, prefixes, preemption, ...

Small settings of what `gnomon verify` runs: eight prompts of up to 150 tokens, 20 tokens each (more
than a page, so that requests grow over a page's edge). The numbers of cases say that nothing was
skipped.
"""

from __future__ import annotations

import pytest

from gnomon.models.config import Family
from gnomon.verify.context import Context
from gnomon.verify.laws import LAWS, choose_laws
from gnomon.verify.margins import AMONG_OURS
from gnomon.verify.result import LawResult, Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

PROMPTS = 8
CASES = {
    "routes": PROMPTS,
    "reference": 4,
    "full_width": PROMPTS,
    "own_width": 5,
    "company": 4 * 2 + 1 * 8 + 1 * 32,
    "chunks": 3 * PROMPTS,
    "padding": 2 * PROMPTS,
    "pieces": PROMPTS,
    "prefixes": 16,
    "preemption": 2 * 2 * PROMPTS,
    "priority": 2 * PROMPTS,
    "sampling": 3 * PROMPTS,
    "choices": 3 * 4,
    "captured": 2 * PROMPTS,
}
OWN = ("operators", "layouts", "text")


@pytest.fixture(scope="module", params=list(Family))
def context(request: pytest.FixtureRequest) -> Context:
    model = f"random:{request.param},layers=5"
    return Context(VerifySettings.of(model=model, prompts=8, max_tokens=20, max_length=150))


def run(context: Context, name: str) -> LawResult:
    (law,) = choose_laws(name)
    result = run_law(law, context)
    assert result.verdict is Verdict.PASS, result.failures
    return result


@pytest.mark.parametrize("name", CASES)
def test_law(context: Context, name: str) -> None:
    result = run(context, name)
    assert result.cases == CASES[name]
    assert result.worst <= AMONG_OURS.logits


@pytest.mark.parametrize("name", OWN)
def test_law_of_parts(context: Context, name: str) -> None:
    result = run(context, name)
    assert result.cases > 200
    assert result.worst <= 1.0


def test_law_of_steps(context: Context) -> None:
    """A case is a row that a token was sampled from."""
    result = run(context, "graphs")
    assert result.cases > 100
    assert result.worst <= AMONG_OURS.logits


def test_every_law_is_tested_here_or_against_transformers() -> None:
    tested = {*CASES, *OWN, "graphs"}
    others = {law.name for law in LAWS} - tested
    assert others == {name for name in others if name.startswith("transformers_")}
