"""GSM8K: word problems of primary school, with worked examples before each.

In:  the test set and a file of examples, both JSON lines with "question" and "answer", whose
     answer ends with a line `#### number` (github.com/openai/grade-school-math; not in the wheel).
Out: `Gsm8kResult`: the strict and the flexible score, and every answer.
Form: the examples are turns of a chat, calculator notes (<<1+2=3>>) taken out; the problem is the
last user's turn.
Scores: strict, the first `####` of the answer is followed, in its line, by one number and that is
right; flexible, the last number of the answer is right. Numbers are compared as values
(numerals.py); thoughts do not count. No example may be a problem of the test set.
Not here: how the questions are asked (respondent.py).
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated as A
from typing import Any

from gnomon.engine.flags import Flag, check_flags
from gnomon.errors import ConfigError
from gnomon.evaluate.numerals import numbers_in
from gnomon.evaluate.respondent import (
    Answer,
    AskSettings,
    Message,
    Progress,
    Question,
    Respondent,
    assistant,
    user,
)
from gnomon.evaluate.score import Score, Usage

ANSWER_TOKENS = 512
MARK = "####"
_NOTE = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8kSettings:
    """What is asked."""

    data: A[str | None, Flag("the problems, JSON lines; needed")] = None
    shots: A[str | None, Flag("worked examples, JSON lines of the same shape")] = None
    num_shots: A[int, Flag("examples before each problem, the first ones of --shots", least=0)] = 8
    limit: A[int | None, Flag("ask only so many problems, drawn by the seed", least=1)] = None

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, its worked answer without calculator notes, and the number it ends with."""

    question: str
    worked: str
    number: Decimal


@dataclass(frozen=True, slots=True)
class Solution:
    """What was answered to a problem."""

    problem: Problem
    answer: Answer
    is_strict: bool
    is_flexible: bool

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "question": self.problem.question,
            "expected": str(self.problem.number),
            "answer": self.answer.text,
            "strict": self.is_strict,
            "flexible": self.is_flexible,
            "finish_reason": self.answer.finish_reason,
            "prompt_tokens": self.answer.num_prompt_tokens,
            "output_tokens": self.answer.num_output_tokens,
        }


@dataclass(frozen=True, slots=True)
class Gsm8kResult:
    """The run. `num_shots` examples stood before each problem."""

    solutions: tuple[Solution, ...]
    num_shots: int
    usage: Usage

    @property
    def strict(self) -> Score:
        """By the number behind `####`."""
        return Score.of(solution.is_strict for solution in self.solutions)

    @property
    def flexible(self) -> Score:
        """By the last number."""
        return Score.of(solution.is_flexible for solution in self.solutions)

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "num_shots": self.num_shots,
            "strict": self.strict.as_json(),
            "flexible": self.flexible.as_json(),
            "usage": self.usage.as_json(),
            "cases": [solution.as_json() for solution in self.solutions],
        }


def run_gsm8k(
    respondent: Respondent, settings: Gsm8kSettings, ask: AskSettings, progress: Progress
) -> Gsm8kResult:
    """Ask the problems and score the answers. ConfigError for files that do not serve."""
    problems, examples = read_settings(settings, ask.question_seed)
    limit = ask.limit(ANSWER_TOKENS)
    questions = [Question(conversation(examples, problem), limit) for problem in problems]
    began = time.monotonic()
    answers = respondent.ask(questions, progress)
    usage = Usage.of(answers, time.monotonic() - began)
    solutions = tuple(
        Solution(
            problem,
            answer,
            is_strict=strict_number(answer.text) == problem.number,
            is_flexible=flexible_number(answer.text) == problem.number,
        )
        for problem, answer in zip(problems, answers, strict=True)
    )
    return Gsm8kResult(solutions, len(examples), usage)


def read_settings(settings: Gsm8kSettings, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(problems, examples) that the settings name."""
    if settings.data is None:
        raise ConfigError("--data is needed: the file of problems, JSON lines (gsm8k_test.jsonl).")
    problems = read_problems(settings.data)
    examples: list[Problem] = []
    if settings.num_shots:
        if settings.shots is None:
            raise ConfigError(
                f"num_shots is {settings.num_shots} and --shots is not given: name a file of "
                "worked examples (training problems), or set --num-shots 0."
            )
        examples = read_problems(settings.shots)[: settings.num_shots]
    if len(examples) < settings.num_shots:
        raise ConfigError(
            f"num_shots is {settings.num_shots}, but {settings.shots} holds {len(examples)}."
        )
    asked = {problem.question for problem in problems}
    known = [example for example in examples if example.question in asked]
    if known:
        raise ConfigError(
            f"{len(known)} of the examples of {settings.shots} are problems of {settings.data}, "
            f"such as {known[0].question[:60]!r}: take training problems for --shots."
        )
    if settings.limit is not None and settings.limit < len(problems):
        drawn = random.Random(f"gsm8k {seed}").sample(range(len(problems)), settings.limit)
        problems = [problems[place] for place in sorted(drawn)]
    return problems, examples


def read_problems(path: str) -> list[Problem]:
    """The problems of a file; ConfigError names the line that is none."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read problems from {path}: {error}") from None
    problems = [
        _problem(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not problems:
        raise ConfigError(f"{path} holds no problem: one JSON object a line is expected.")
    return problems


def _problem(line: str, place: str) -> Problem:
    try:
        found = json.loads(line)
        question, answer = found["question"], found["answer"]
        worked, marked, tail = answer.rpartition(MARK)
        (number,) = numbers_in(tail)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f'{place}: a JSON object with the texts "question" and "answer", which ends with '
            f"{MARK} and one number, is expected; it is {line[:80]!r}."
        ) from None
    if not (isinstance(question, str) and question.strip() and marked):
        raise ConfigError(f'{place}: "question" is empty, or "answer" has no {MARK}.')
    return Problem(question, _NOTE.sub("", worked) + marked + tail, number)


def conversation(examples: Sequence[Problem], problem: Problem) -> tuple[Message, ...]:
    """Examples as turns, then the problem."""
    turns = [turn for one in examples for turn in (user(one.question), assistant(one.worked))]
    return (*turns, user(problem.question))


def strict_number(text: str) -> Decimal | None:
    """The one number in the line behind the first `####`; None if there is not exactly one."""
    _, found, rest = text.partition(MARK)
    numbers = numbers_in(rest.split("\n", 1)[0]) if found else []
    return numbers[0] if len(numbers) == 1 else None


def flexible_number(text: str) -> Decimal | None:
    """The last number of a text; None if there is none."""
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None
