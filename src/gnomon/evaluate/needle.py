"""Needles in a haystack: a number planted at some depth of a text of some length, then asked for.

In:  lengths in tokens, a number of depths, how many facts a text holds; a respondent.
Out: `NeedleResult`: the share of right answers by length and depth, and, where the respondent can
     look, the share of layers whose index list holds the number's first token in the row that
     writes the answer's first token.
Grid: every sample of every length asks once at every depth. The depths are dealt, in random order,
to texts of `keys` facts each, which are all asked, so that a text serves several questions and each
question has to tell its fact from the others. All texts are asked once, then a second time, and so
on: from the second time on they are in the prefix cache.
Length: a prompt and the room for its answer together come close to the length from below. Texts are
measured in characters; how many make a token is found with two prompts at the start.
Score: exact match. The whole numbers of the answer are the one that was asked for, and no other.
Not here: the words (needle_text.py), the looking (answering_rows.py), pictures (heat_map.py).
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated as A
from typing import Any

from gnomon.engine.flags import Flag, check_flags
from gnomon.errors import ConfigError
from gnomon.evaluate.needle_context import Asked, Context, draw_context
from gnomon.evaluate.respondent import Answer, AskSettings, Progress, Question, Respondent, user
from gnomon.evaluate.score import Score, Usage

ANSWER_TOKENS = 32
DEFAULT_LENGTHS = (512, 1024, 2048, 4096)
SHORTEST = 128
SAMPLE_CHARS = 1200
MARGIN = 0.97  # of the room: texts of one size differ by so much in tokens
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleSettings:
    """What is asked."""

    lengths: A[
        str | None, Flag("lengths in tokens, with commas; not given: 512 to 4096, as the model has")
    ] = None
    depths: A[int, Flag("depths, from the first sentence to the last", least=2)] = 10
    keys: A[int, Flag("facts in a text", least=1)] = 5
    samples: A[int, Flag("questions for each length and depth", least=1)] = 4

    def __post_init__(self) -> None:
        check_flags(self)
        self.given_lengths()

    def given_lengths(self) -> tuple[int, ...]:
        """The lengths that were given, ascending; none if they were not."""
        if self.lengths is None:
            return ()
        try:
            found = sorted({int(part) for part in self.lengths.split(",")})
        except ValueError:
            found = []
        if not found or found[0] < SHORTEST:
            raise ConfigError(
                f"lengths is {self.lengths!r}: whole numbers of at least {SHORTEST} with commas "
                'between them are expected, as "512,1024".'
            )
        return tuple(found)

    def depth_values(self) -> tuple[float, ...]:
        """From 0 to 1, evenly."""
        return tuple(place / (self.depths - 1) for place in range(self.depths))


@dataclass(frozen=True, slots=True)
class NeedleCase:
    """One question and what came of it."""

    length: int
    asked: Asked
    answer: Answer
    is_correct: bool

    @property
    def listed_share(self) -> float | None:
        """Share of layers that listed the needle; None where nobody looked."""
        listed = self.answer.listed
        if listed is None:
            return None
        return sum(listed.values()) / len(listed) if listed else 1.0

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        listed = self.answer.listed
        return {
            "length": self.length,
            "depth": self.asked.depth,
            "question": self.asked.question,
            "expected": self.asked.fact.value,
            "answer": self.answer.text,
            "correct": self.is_correct,
            "prompt_tokens": self.answer.num_prompt_tokens,
            "listed_by_layer": None if listed is None else {str(k): v for k, v in listed.items()},
        }


@dataclass(frozen=True, slots=True)
class NeedleResult:
    """The run. `lengths` and `depths` are the axes of the grid."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cases: tuple[NeedleCase, ...]
    usage: Usage

    @property
    def score(self) -> Score:
        """Over all cases."""
        return Score.of(case.is_correct for case in self.cases)

    def at(self, length: int, depth: float | None = None) -> list[NeedleCase]:
        """The cases of a length, or of one cell."""
        return [
            case
            for case in self.cases
            if case.length == length and depth in (None, case.asked.depth)
        ]

    def by_layer(self) -> Mapping[int, Score]:
        """Layer -> in how many of the cases with lists its list held the needle."""
        seen = [case.answer.listed for case in self.cases if case.answer.listed]
        layers = sorted({layer for listed in seen for layer in listed})
        return {
            layer: Score.of(listed[layer] for listed in seen if layer in listed) for layer in layers
        }

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "score": self.score.as_json(),
            "by_length": {str(n): Score.of(c.is_correct for c in self.at(n)).as_json()
                          for n in self.lengths},
            "grid": [
                {"length": n, "depth": depth, "listed_share": listed_share(self.at(n, depth)),
                 **Score.of(case.is_correct for case in self.at(n, depth)).as_json()}
                for n in self.lengths
                for depth in self.depths
            ],
            "listed_share": listed_share(self.cases),
            "listed_by_layer": {str(n): score.as_json() for n, score in self.by_layer().items()},
            "usage": self.usage.as_json(),
            "cases": [case.as_json() for case in self.cases],
        }  # fmt: skip


def listed_share(cases: Sequence[NeedleCase]) -> float | None:
    """The mean over cases of the share of layers that listed the needle; None if nobody looked."""
    shares = [share for case in cases if (share := case.listed_share) is not None]
    return sum(shares) / len(shares) if shares else None


def run_needle(
    respondent: Respondent, settings: NeedleSettings, ask: AskSettings, progress: Progress
) -> NeedleResult:
    """Draw the contexts, ask, score. ConfigError for a length that the model does not hold."""
    lengths = choose_lengths(settings, respondent.max_model_len)
    limit = ask.limit(ANSWER_TOKENS)
    ruler = measure(respondent, ask.question_seed)
    contexts = [
        (length, context)
        for length in lengths
        for context in draw_contexts(
            settings, ask.question_seed, length, ruler.chars(length, limit)
        )
    ]
    rounds = [
        [(length, context, context.asked[turn]) for length, context in contexts
         if turn < len(context.asked)]
        for turn in range(settings.keys)
    ]  # fmt: skip
    wanted = [one for one_round in rounds for one in one_round]
    began = time.monotonic()
    answers: list[Answer] = []
    for one_round in rounds:
        questions = [
            Question((user(context.prompt(asked)),), limit, watched=asked.fact.value)
            for _, context, asked in one_round
        ]
        answers += respondent.ask(questions, _from(progress, len(answers), len(wanted)))
    usage = Usage.of(answers, time.monotonic() - began)
    cases = tuple(
        NeedleCase(length, asked, answer, is_match(answer.text, asked.fact.value))
        for (length, _, asked), answer in zip(wanted, answers, strict=True)
    )
    return NeedleResult(lengths, settings.depth_values(), cases, usage)


def _from(progress: Progress, num_before: int, total: int) -> Progress:
    """Progress of one round as progress of all."""
    return lambda done, _: progress(num_before + done, total)


def choose_lengths(settings: NeedleSettings, max_model_len: int | None) -> tuple[int, ...]:
    """The lengths to ask at. Those that were given have to fit; the usual ones that fit do."""
    given = settings.given_lengths()
    if max_model_len is None:
        return given or DEFAULT_LENGTHS
    if given and given[-1] > max_model_len:
        raise ConfigError(
            f"lengths holds {given[-1]}, but the model's context holds {max_model_len} tokens, "
            "prompt and answer together: leave it out, or raise --max-model-len."
        )
    fitting = given or tuple(n for n in DEFAULT_LENGTHS if n <= max_model_len)
    if not fitting:
        raise ConfigError(
            f"the model's context holds {max_model_len} tokens, less than the shortest of the "
            f"usual lengths ({DEFAULT_LENGTHS[0]}): give --lengths."
        )
    return fitting


@dataclass(frozen=True, slots=True)
class Ruler:
    """Tokens of an empty conversation, and characters per token of the texts drawn here."""

    num_frame_tokens: int
    chars_per_token: float

    def chars(self, length: int, num_answer_tokens: int) -> int:
        """Characters of a user's message for prompts of this length with room for the answer."""
        room = length - num_answer_tokens - self.num_frame_tokens
        if room < SHORTEST // 4:
            raise ConfigError(
                f"length {length} leaves {max(0, room)} tokens for the text, beside an answer of "
                f"{num_answer_tokens}: ask for a greater length or fewer --answer-tokens."
            )
        return int(room * MARGIN * self.chars_per_token)


def measure(respondent: Respondent, seed: int) -> Ruler:
    """Find out how long texts become, with two prompts."""
    sample = draw_context(random.Random(f"ruler {seed}"), SAMPLE_CHARS, (0.5,), 4).text
    least = respondent.num_tokens((user("."),))
    num_tokens = respondent.num_tokens((user(sample),)) - least
    if num_tokens < 1:
        raise ConfigError(
            f"{respondent.place} counts {num_tokens} tokens for {len(sample)} characters: it has "
            "to report usage.prompt_tokens."
        )
    return Ruler(least, len(sample) / num_tokens)


def draw_contexts(
    settings: NeedleSettings, seed: int, length: int, num_chars: int
) -> list[Context]:
    """The contexts of one length: `samples` times all depths, dealt to texts of `keys` facts."""
    contexts = []
    for sample in range(settings.samples):
        dice = random.Random(f"needle {seed} {length} {sample}")
        depths = list(settings.depth_values())
        dice.shuffle(depths)
        for start in range(0, len(depths), settings.keys):
            own = depths[start : start + settings.keys]
            contexts.append(draw_context(dice, num_chars, own, settings.keys))
    return contexts


def is_match(text: str, value: str) -> bool:
    """Whether the whole numbers in a text are `value`, perhaps repeated, and nothing else."""
    return set(_DIGITS.findall(_THOUSANDS.sub("", text))) == {value}
