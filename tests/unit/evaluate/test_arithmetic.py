"""Sums: which are drawn, what counts as right, whole runs with known answers."""

from __future__ import annotations

import json
import re
import zlib

import pytest

from gnomon.evaluate.arithmetic import (
    DIGITS,
    SIGNS,
    ArithmeticSettings,
    draw_sums,
    is_exactly,
    run_arithmetic,
)
from gnomon.evaluate.respondent import AskSettings
from tests.unit.evaluate.partners import Scripted, unheard


def solve(text: str) -> int:
    """The result of a question, read from its words."""
    a, b = map(int, re.findall(r"[0-9]+", text))
    return a - b if "-" in text or "minus" in text else a + b


def test_only_held_out_pairs_are_asked_once_each() -> None:
    sums = draw_sums(600, seed=1)
    assert len(sums) == 600
    assert all(zlib.crc32(f"{s.a}{s.sign}{s.b}".encode()) % 8 == 0 for s in sums)
    assert len({(s.a, s.b, s.sign) for s in sums}) == 600
    assert all(s.result >= 0 and max(s.a, s.b) <= 999 for s in sums)
    assert all(solve(s.text) == s.result for s in sums)
    assert sums == draw_sums(600, seed=1)
    assert sums != draw_sums(600, seed=2)


def test_cells_are_equally_full_as_far_as_they_go() -> None:
    sums = draw_sums(60, seed=0)
    counts = {
        (sign, digits): sum((s.sign, s.digits) == (sign, digits) for s in sums)
        for sign in SIGNS
        for digits in DIGITS
    }
    all_small = [
        (a, b) for a in range(10) for b in range(a + 1) if zlib.crc32(f"{a}-{b}".encode()) % 8 == 0
    ]
    assert len(all_small) < 10  # so that this cell runs out
    assert counts["-", 1] == len(all_small)
    others = [count for cell, count in counts.items() if cell != ("-", 1)]
    assert max(others) - min(others) <= 1


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("19", True),
        (" 19\n", True),
        ("19.", False),
        ("019", False),
        ("119", False),
        ("1 9", False),
        ("12 + 7 = 19", False),
        ("19 19", False),
        ("１９", False),
        ("", False),
    ],
)
def test_exactly_the_number(text: str, is_right: bool) -> None:
    assert is_exactly(text, 19) is is_right


def test_a_perfect_respondent_scores_everything() -> None:
    partner = Scripted(lambda text: str(solve(text)))
    result = run_arithmetic(partner, ArithmeticSettings(num_sums=30), AskSettings(), unheard)
    assert (result.strict.num_correct, result.flexible.num_correct) == (30, 30)
    assert {question.messages[-1]["role"] for question in partner.asked} == {"user"}
    report = json.loads(json.dumps(result.as_json()))
    assert sum(cell["n"] for cell in report["cells"]) == 30
    assert all(cell["share"] == 1.0 for cell in report["cells"])


def test_a_talkative_respondent_is_flexibly_right() -> None:
    partner = Scripted(lambda text: f"{text} That makes {solve(text)}.")
    result = run_arithmetic(partner, ArithmeticSettings(num_sums=30), AskSettings(), unheard)
    assert (result.strict.num_correct, result.flexible.num_correct) == (0, 30)


def test_off_by_one_scores_nothing() -> None:
    partner = Scripted(lambda text: str(solve(text) + 1))
    result = run_arithmetic(partner, ArithmeticSettings(num_sums=30), AskSettings(), unheard)
    assert (result.strict.num_correct, result.flexible.num_correct) == (0, 0)
    assert result.cell("+", 2).num_cases > 0
