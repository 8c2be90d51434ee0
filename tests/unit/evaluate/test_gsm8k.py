"""GSM8K: reading, the conversation, both scores, and whole runs with known answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import pytest

from gnomon.errors import ConfigError
from gnomon.evaluate.gsm8k import (
    Gsm8kSettings,
    flexible_number,
    read_problems,
    read_settings,
    run_gsm8k,
    strict_number,
)
from gnomon.evaluate.respondent import AskSettings
from tests.unit.evaluate.partners import Scripted, unheard


def lines(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs)


@pytest.fixture
def settings(tmp_path: Path) -> Gsm8kSettings:
    """Ten problems `Double n?`, three examples `Halve n?`."""
    data, shots = tmp_path / "test.jsonl", tmp_path / "train.jsonl"
    data.write_text(
        lines(
            [(f"Double {n}?", f"2*{n}=<<2*{n}={2 * n}>>{2 * n}\n#### {2 * n}") for n in range(10)]
        )
    )
    shots.write_text(
        lines([(f"Halve {2 * n},000?", f"It is <<{n}>>{n}\n#### {n},000") for n in (1, 2, 3)])
    )
    return Gsm8kSettings(data=str(data), shots=str(shots), num_shots=2)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("2*9=18\n#### 18", "18", "18"),
        ("#### $18.00 ", "18", "18"),
        ("#### 1,234", "1234", "1234"),
        ("#### -3", "-3", "-3"),
        ("#### 18.50", "18.5", "18.5"),  # not 50
        ("#### 18\n\nQuestion: and 5 more?\n#### 23", "18", "23"),  # it went on by itself
        ("#### 18 or 20", None, "20"),  # it hedges
        ("#### \n18", None, "18"),
        ("####eighteen", None, None),
        ("She makes $18 every day.", None, "18"),
        ("She makes $18 on each of 7 days", None, "7"),
        ("The answer is \\boxed{18}", None, "18"),
        ("", None, None),
    ],
)
def test_strict_and_flexible(text: str, strict: str | None, flexible: str | None) -> None:
    assert strict_number(text) == (None if strict is None else Decimal(strict))
    assert flexible_number(text) == (None if flexible is None else Decimal(flexible))


def test_a_perfect_respondent_scores_everything(settings: Gsm8kSettings) -> None:
    partner = Scripted(lambda text: f"Let me see. #### {2 * int(text[7:-1])}.00")
    seen: list[tuple[int, int]] = []
    result = run_gsm8k(partner, settings, AskSettings(), lambda *now: seen.append(now))
    assert (result.strict.share, result.flexible.share) == (1.0, 1.0)
    assert result.strict.num_cases == 10
    assert seen[-1] == (10, 10)
    (first, *_) = partner.asked
    assert first.messages == (
        {"role": "user", "content": "Halve 2,000?"},
        {"role": "assistant", "content": "It is 1\n#### 1,000"},
        {"role": "user", "content": "Halve 4,000?"},
        {"role": "assistant", "content": "It is 2\n#### 2,000"},
        {"role": "user", "content": "Double 0?"},
    )
    report = json.loads(json.dumps(result.as_json()))
    assert report["strict"]["n"] == 10
    assert report["num_shots"] == 2
    assert report["usage"]["output_tokens"] == 20
    assert report["cases"][3]["expected"] == "6"


def test_a_wrong_respondent_scores_nothing(settings: Gsm8kSettings) -> None:
    partner = Scripted(
        lambda text: f"{2 * int(text[7:-1])} is not it. #### {2 * int(text[7:-1])}.5"
    )
    result = run_gsm8k(partner, settings, AskSettings(), unheard)
    assert (result.strict.num_correct, result.flexible.num_correct) == (0, 0)


def test_flexible_but_not_strict(settings: Gsm8kSettings) -> None:
    partner = Scripted(lambda text: f"so {2 * int(text[7:-1])}.")
    result = run_gsm8k(partner, settings, AskSettings(), unheard)
    assert (result.strict.num_correct, result.flexible.num_correct) == (0, 10)


def test_a_limit_draws_by_the_seed(settings: Gsm8kSettings) -> None:
    few = Gsm8kSettings(data=settings.data, num_shots=0, limit=4)
    drawn = [tuple(one.question for one in read_settings(few, seed)[0]) for seed in range(20)]
    assert {len(set(one)) for one in drawn} == {4}
    assert len(set(drawn)) > 5
    assert drawn[3] == tuple(one.question for one in read_settings(few, 3)[0])
    more = Gsm8kSettings(data=settings.data, num_shots=0, limit=99)
    assert len(read_settings(more, 0)[0]) == 10


def test_what_is_missing_is_said(settings: Gsm8kSettings, tmp_path: Path) -> None:
    for wrong, part in (
        (Gsm8kSettings(), "--data is needed"),
        (Gsm8kSettings(data=settings.data), "--shots is not given"),
        (Gsm8kSettings(data=settings.data, shots=settings.shots, num_shots=4), "holds 3"),
        (Gsm8kSettings(data=settings.data, shots=settings.data, num_shots=1), "training problems"),
        (Gsm8kSettings(data=str(tmp_path / "none"), num_shots=0), "cannot read"),
    ):
        with pytest.raises(ConfigError, match=part):
            read_settings(wrong, 0)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        '{"question": "q"}',
        '{"question": "q", "answer": 3}',
        '{"question": "q", "answer": "18"}',
        '{"question": "q", "answer": "#### "}',
        '{"question": "q", "answer": "#### 3 or 4"}',
        '{"question": " ", "answer": "#### 3"}',
    ],
)
def test_a_line_that_is_no_problem_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text(lines([("q", "#### 3")]) + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_problems(str(file))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no problem"):
        read_problems(str(file))


def test_a_line_separator_inside_a_text_is_no_line_end(tmp_path: Path) -> None:
    file = tmp_path / "data"
    text = json.dumps({"question": "a\u2028b", "answer": "#### 3"}, ensure_ascii=False)
    file.write_text(text, encoding="utf-8")
    assert [one.question for one in read_problems(str(file))] == ["a\u2028b"]
