"""Fifty fixed prompts of the model that ships: the same tokens through every engine law.

The laws are those of `gnomon verify`, in float32, over texts that the model was made for: needles,
sums, thoughts, tool calls in both formats, a story, English (tiny_prompts.json, drawn once from the
recipe's held-out kinds). Random weights have flat logits; here a wrong key list costs the answer,
so that the last test sees whether the prompts' answers come at all.
Oracle: each prompt's run alone, whole and cold; the recorded right answers for that run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.models.built_in import built_in_folder
from gnomon.text.tokenizer import Tokenizer
from gnomon.verify.context import Context
from gnomon.verify.law import Law
from gnomon.verify.laws import batching, memory, routes, sampling
from gnomon.verify.result import Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

GREEDY = (*routes.LAWS, *batching.LAWS, *memory.LAWS)
SAMPLING = next(law for law in sampling.LAWS if law.name == "sampling")
CASES = json.loads((Path(__file__).parent / "tiny_prompts.json").read_text(encoding="utf-8"))
ANSWERED = [case for case in CASES if case["answer"] is not None]
NUM_TOKENS = 5
NUM_SAMPLED = 12  # prompts of the law on sampled tokens, which runs each four times


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(built_in_folder())


def context_of(tokenizer: Tokenizer, cases: list[dict[str, str]]) -> Context:
    """The laws' context with these prompts in place of random ones."""
    context = Context(VerifySettings.of(max_tokens=NUM_TOKENS, block_size=16, max_length=400))
    prompts = [
        tuple(tokenizer.encode_with_specials(case["text"], add_special_tokens=False))
        for case in cases
    ]
    assert len(prompts) == len(set(prompts)) == len(cases)
    assert context.once("engine", lambda: prompts) is prompts
    return context


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> Context:
    assert len(CASES) == 50
    return context_of(tokenizer, CASES)


@pytest.mark.parametrize("law", GREEDY, ids=[law.name for law in GREEDY])
def test_the_tokens_are_the_same_through_every_law(law: Law, context: Context) -> None:
    result = run_law(law, context)
    assert result.verdict is Verdict.PASS, result
    assert result.cases >= 3


def test_sampled_tokens_too(tokenizer: Tokenizer) -> None:
    spread = CASES[:: len(CASES) // NUM_SAMPLED]
    result = run_law(SAMPLING, context_of(tokenizer, spread))
    assert result.verdict is Verdict.PASS, result
    assert result.cases >= NUM_SAMPLED


def test_the_answers_are_right(context: Context, tokenizer: Tokenizer) -> None:
    traces = context.reference(context.engine_prompts())
    right = 0
    for case, trace in zip(CASES, traces, strict=True):
        if case["answer"] is not None:
            wanted = tokenizer.encode_with_specials(case["answer"], add_special_tokens=False)
            wanted = wanted[:NUM_TOKENS]
            right += list(trace.output[: len(wanted)]) == wanted
    assert right >= 0.9 * len(ANSWERED)
