"""How good, and how sure: a share of right answers, its Wilson interval, the tokens it took.

In:  counts; answers.
Out: `Score`, `Usage`, each with its JSON.
Maths: E. B. Wilson, Probable inference, the law of succession, and statistical inference (1927):
the interval of all shares p for which (share − p)² <= z² p (1 − p) / n.
Not here: what counts as right (numbers.py and the evaluations).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.errors import ConfigError
from gnomon.evaluate.respondent import Answer

Z_95 = 1.959963984540054  # quantile 0.975 of the normal distribution


def wilson(num_correct: int, num_cases: int, z: float = Z_95) -> tuple[float, float]:
    """Lower and upper bound of the share, within [0, 1]; (0, 1) if there are no cases."""
    if not 0 <= num_correct <= num_cases:
        raise ConfigError(f"{num_correct} right answers of {num_cases} cases: at most all")
    if num_cases == 0:
        return 0.0, 1.0
    share, scale = num_correct / num_cases, z * z / num_cases
    middle = (share + scale / 2) / (1 + scale)
    half = math.sqrt(scale * (share * (1 - share) + scale / 4)) / (1 + scale)
    low = 0.0 if num_correct == 0 else max(0.0, middle - half)
    high = 1.0 if num_correct == num_cases else min(1.0, middle + half)
    return low, high


@dataclass(frozen=True, slots=True)
class Score:
    """`num_correct` of `num_cases`."""

    num_correct: int
    num_cases: int

    @classmethod
    def of(cls, verdicts: Iterable[bool]) -> Score:
        """The score of single verdicts."""
        found = list(verdicts)
        return cls(sum(found), len(found))

    @property
    def share(self) -> float:
        """0 to 1; 0 if there are no cases."""
        return self.num_correct / self.num_cases if self.num_cases else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the share."""
        return wilson(self.num_correct, self.num_cases)

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "correct": self.num_correct,
            "n": self.num_cases,
            "share": self.share,
            "wilson_95": list(self.interval),
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a run, and its seconds. Cached ones are part of the prompts'."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_cut: int  # answers that ended because of the limit of tokens
    seconds: float

    @classmethod
    def of(cls, answers: Iterable[Answer], seconds: float) -> Usage:
        """What these answers took."""
        found = list(answers)
        return cls(
            sum(answer.num_prompt_tokens for answer in found),
            sum(answer.num_cached_tokens for answer in found),
            sum(answer.num_output_tokens for answer in found),
            sum(answer.finish_reason == "length" for answer in found),
            seconds,
        )

    def as_json(self) -> Mapping[str, float]:
        """For reports."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "answers_cut_by_length": self.num_cut,
            "seconds": round(self.seconds, 3),
        }
