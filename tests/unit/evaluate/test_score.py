"""Shares and their intervals, against the definition of Wilson's interval."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.evaluate.respondent import Answer, AskSettings, without_thoughts
from gnomon.evaluate.score import Z_95, Score, Usage, wilson


def is_inside(p: float, correct: int, cases: int) -> bool:
    """Whether a true share p is within z standard errors, its own, of what was seen."""
    return (correct / cases - p) ** 2 <= Z_95**2 * p * (1 - p) / cases


def edge(inside: float, outside: float, correct: int, cases: int) -> float:
    """Where the interval ends, by halving."""
    for _ in range(80):
        middle = (inside + outside) / 2
        inside, outside = (
            (middle, outside) if is_inside(middle, correct, cases) else (inside, middle)
        )
    return inside


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_what_the_definition_allows(counts: tuple[int, int]) -> None:
    correct, cases = counts
    low, high = wilson(correct, cases)
    share = correct / cases
    assert 0.0 <= low <= share <= high <= 1.0
    assert low == pytest.approx(edge(share, 0.0, correct, cases), abs=1e-9)
    assert high == pytest.approx(edge(share, 1.0, correct, cases), abs=1e-9)


def test_published_values() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3, his four examples.
    for correct, cases, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(correct, cases) == pytest.approx((low, high), abs=5e-5)


def test_nothing_asked_is_nothing_known() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert Score.of([]).share == 0.0
    with pytest.raises(ConfigError, match="3 right answers of 2"):
        wilson(3, 2)


def test_a_score_counts() -> None:
    score = Score.of([True, False, True, True])
    assert (score.num_correct, score.num_cases, score.share) == (3, 4, 0.75)
    assert score.as_json()["wilson_95"] == list(wilson(3, 4))


def test_usage_adds_up() -> None:
    answers = [Answer("", 10, 3, 4, "length"), Answer("", 20, 5, 0, "stop")]
    assert Usage.of(answers, 1.25).as_json() == {
        "prompt_tokens": 30,
        "cached_tokens": 4,
        "output_tokens": 8,
        "answers_cut_by_length": 1,
        "seconds": 1.25,
    }


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("18", "18"),
        ("<think>3 + 4 = 7</think>\n18", "18"),
        ("it may be 3</think>18 ", "18"),
        ("<think>a</think>4<think>b</think>5", "5"),
        ("<think>3 + 4 = 7", ""),  # never closed: no answer
    ],
)
def test_thoughts_are_no_answer(text: str, rest: str) -> None:
    assert without_thoughts(text) == rest


def test_the_limit_has_room_for_thoughts() -> None:
    assert AskSettings().limit(32) == 32
    assert AskSettings(thinking="on").limit(32) > 200
    assert AskSettings(thinking="on", answer_tokens=7).limit(32) == 7
    with pytest.raises(ConfigError, match="thinking is 'of'"):
        AskSettings(thinking="of")
