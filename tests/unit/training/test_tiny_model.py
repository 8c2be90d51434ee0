"""The model that ships with gnomon looks things up through its index lists, and only through them.

A wrong selection must show (issue 4): random lists, index RoPE of the other kind, one key a row.
Small samples of two lengths; the card has the whole grid.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from gnomon.evaluate.answering_rows import AnsweringRows
from gnomon.evaluate.arithmetic import ArithmeticSettings, run_arithmetic
from gnomon.evaluate.engine_respondent import EngineRespondent
from gnomon.evaluate.needle import NeedleResult, NeedleSettings, run_needle
from gnomon.evaluate.respondent import AskSettings
from gnomon.frontend.llm import LLM
from tests.unit.evaluate.broken import RandomLists
from tests.unit.evaluate.partners import unheard

TINY = str(files("gnomon") / "assets" / "tiny")
GRID = NeedleSettings(lengths="512,1024", depths=8, keys=4, samples=3)  # 48 questions
ASK = AskSettings(question_seed=11, answer_tokens=10)

LONG = NeedleSettings(lengths="4096", depths=10, keys=10, samples=1)  # one text, 10 questions

Measure = Callable[..., NeedleResult]


def tiny(**overrides: Any) -> LLM:
    return LLM(TINY, num_kv_pages=400, hf_overrides=overrides)


@pytest.fixture(scope="module")
def measure() -> Measure:
    """A run of the grid, with fields of config.json replaced or with a tap of one's own."""

    def run(tap: AnsweringRows | None = None, **overrides: Any) -> NeedleResult:
        return run_needle(EngineRespondent(tiny(**overrides), ASK, tap), GRID, ASK, unheard)

    return run


@pytest.fixture(scope="module")
def sound(measure: Measure) -> NeedleResult:
    return measure()


def test_needles_are_found(sound: NeedleResult) -> None:
    assert sound.score.num_cases == 48
    assert sound.score.share >= 0.94
    assert max(score.share for score in sound.by_layer().values()) >= 0.9


def test_random_lists_show(measure: Measure) -> None:
    assert measure(RandomLists()).score.share <= 0.2


def test_index_rope_of_the_other_kind_shows(measure: Measure) -> None:
    assert measure(indexer_rope_interleave=True).score.share <= 0.6


def test_one_key_a_row_shows(measure: Measure, sound: NeedleResult) -> None:
    assert measure(index_topk=1).score.share <= sound.score.share - 0.2


def test_sparse_is_dense_for_the_answers(measure: Measure, sound: NeedleResult) -> None:
    dense = measure(index_topk=4096)
    assert abs(dense.score.num_correct - sound.score.num_correct) <= 1


@pytest.mark.parametrize("topk", [64, 8192])
def test_long_texts_are_read_by_lists_and_densely(topk: int) -> None:
    respondent = EngineRespondent(tiny(index_topk=topk), ASK)
    assert run_needle(respondent, LONG, ASK, unheard).score.num_correct >= 9


def test_sums_are_right() -> None:
    settings = ArithmeticSettings(num_sums=90)
    result = run_arithmetic(EngineRespondent(tiny(), ASK), settings, ASK, unheard)
    assert result.flexible.share >= 0.85
    assert result.strict.share >= 0.85
