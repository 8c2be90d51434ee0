"""Addition and subtraction of numbers of one to three digits, in chat form.

In:  how many sums; a seed.
Out: `ArithmeticResult`: scores overall, by sign and by digits, and every answer.
Rule: the pair of operands, written "a+b" or "a-b", is held out of training (held_out.py). No
subtraction goes below zero. A sum counts as of as many digits as its larger operand. The six cells
(sign, digits) are asked equally often, each pair once, as far as a cell has pairs enough.
Scores: strict, the answer is the number and nothing else; flexible, the last number is right.
Not here: how the questions are asked (respondent.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Annotated as A
from typing import Any

from gnomon.engine.flags import Flag, check_flags
from gnomon.evaluate.gsm8k import flexible_number
from gnomon.evaluate.held_out import is_held_out
from gnomon.evaluate.respondent import Answer, AskSettings, Progress, Question, Respondent, user
from gnomon.evaluate.score import Score, Usage

ANSWER_TOKENS = 32
DIGITS = (1, 2, 3)
SIGNS = ("+", "-")
WORDINGS = {
    "+": ("What is {a} + {b}?", "Compute {a} plus {b}.", "{a} + {b} = ?"),
    "-": ("What is {a} - {b}?", "Compute {a} minus {b}.", "{a} - {b} = ?"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSettings:
    """What is asked."""

    num_sums: A[int, Flag("how many sums", least=1)] = 240

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True)
class Sum:
    """Two operands and a sign."""

    a: int
    b: int
    sign: str
    text: str

    @property
    def result(self) -> int:
        """What is right."""
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def digits(self) -> int:
        """Of the larger operand."""
        return len(str(max(self.a, self.b)))


@dataclass(frozen=True, slots=True)
class Solved:
    """What was answered to a sum."""

    sum: Sum
    answer: Answer
    is_strict: bool
    is_flexible: bool

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "question": self.sum.text,
            "expected": self.sum.result,
            "answer": self.answer.text,
            "strict": self.is_strict,
            "flexible": self.is_flexible,
            "prompt_tokens": self.answer.num_prompt_tokens,
            "output_tokens": self.answer.num_output_tokens,
        }


@dataclass(frozen=True, slots=True)
class ArithmeticResult:
    """The run."""

    solved: tuple[Solved, ...]
    usage: Usage

    @property
    def strict(self) -> Score:
        """The answer is the number alone."""
        return Score.of(one.is_strict for one in self.solved)

    @property
    def flexible(self) -> Score:
        """The last number of the answer is right."""
        return Score.of(one.is_flexible for one in self.solved)

    def cell(self, sign: str, digits: int) -> Score:
        """The flexible score of one sign and number of digits."""
        return Score.of(
            one.is_flexible
            for one in self.solved
            if (one.sum.sign, one.sum.digits) == (sign, digits)
        )

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "strict": self.strict.as_json(),
            "flexible": self.flexible.as_json(),
            "cells": [
                {"sign": sign, "digits": digits, **self.cell(sign, digits).as_json()}
                for sign in SIGNS
                for digits in DIGITS
            ],
            "usage": self.usage.as_json(),
            "cases": [one.as_json() for one in self.solved],
        }


def run_arithmetic(
    respondent: Respondent, settings: ArithmeticSettings, ask: AskSettings, progress: Progress
) -> ArithmeticResult:
    """Ask the sums and score the answers."""
    sums = draw_sums(settings.num_sums, ask.question_seed)
    limit = ask.limit(ANSWER_TOKENS)
    questions = [Question((user(one.text),), limit) for one in sums]
    began = time.monotonic()
    answers = respondent.ask(questions, progress)
    usage = Usage.of(answers, time.monotonic() - began)
    solved = tuple(
        Solved(
            one,
            answer,
            is_strict=is_exactly(answer.text, one.result),
            is_flexible=flexible_number(answer.text) == one.result,
        )
        for one, answer in zip(sums, answers, strict=True)
    )
    return ArithmeticResult(solved, usage)


def is_exactly(text: str, number: int) -> bool:
    """Whether the text is this whole number, in plain digits, and nothing else but white space."""
    return text.strip() == str(number)


def draw_sums(count: int, seed: int) -> list[Sum]:
    """Sums of all cells in turn, held-out pairs only; fewer if all pairs are used up."""
    cells = [
        _pairs(random.Random(f"arithmetic {seed} {sign} {digits}"), sign, digits)
        for digits in DIGITS
        for sign in SIGNS
    ]
    in_turn = (one for one in chain.from_iterable(zip_longest(*cells)) if one is not None)
    return list(islice(in_turn, count))


def _pairs(dice: random.Random, sign: str, digits: int) -> Iterator[Sum]:
    """The held-out sums of a cell in random order.

    It ends after so many draws that every pair has come: each is missed with probability e^-20.
    """
    limit, seen = 10**digits, set[tuple[int, int]]()
    least = limit // 10 if digits > 1 else 0
    for _ in range(20 * limit * limit):
        a, b = dice.randrange(limit), dice.randrange(limit)
        fits = max(a, b) >= least and (sign == "+" or a >= b)
        if fits and (a, b) not in seen and is_held_out(f"{a}{sign}{b}"):
            seen.add((a, b))
            yield Sum(a, b, sign, dice.choice(WORDINGS[sign]).format(a=a, b=b))
