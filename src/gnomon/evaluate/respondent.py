"""The seam between an evaluation and whoever answers: questions in, answers out.

In:  `Question`s, conversations with a limit of new tokens.
Out: `Answer`s in the order of the questions. An answer's text is what follows the thoughts.
`AskSettings` is what all evaluations share; its fields are flags.
Errors: GnomonError if a question stays without an answer: a score with holes is not reported.
Not here: the two respondents (engine_respondent.py, server_respondent.py), scoring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated as A
from typing import Protocol

from gnomon.engine.flags import Flag, check_flags

THOUGHT_TOKENS = 256  # room for thoughts, unless a limit is given
THINK_START, THINK_END = "<think>", "</think>"

Message = Mapping[str, str]  # role, content
Progress = Callable[[int, int], None]  # (answered, of)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSettings:
    """How questions are put."""

    url: A[str | None, Flag("ask this running server, http://host:port; not given: in process")] = (
        None
    )
    concurrency: A[int | None, Flag("questions under way at a server; 8 if not given", least=1)] = (
        None
    )
    answer_tokens: A[
        int | None, Flag("new tokens per answer at most; not given: as the task needs", least=1)
    ] = None
    temperature: A[float, Flag("0 is greedy, up to 2", least=0.0, greatest=2.0)] = 0.0
    thinking: A[
        str,
        Flag(
            "whether the answer starts with thoughts; auto leaves it to the model and sends "
            "nothing about it",
            choices=("off", "on", "auto"),
        ),
    ] = "off"
    question_seed: A[int, Flag("seed of what is drawn: texts, keys, samples", least=0)] = 0

    def __post_init__(self) -> None:
        check_flags(self)

    def limit(self, num_needed: int) -> int:
        """New tokens per answer: as given, or what a task needs and room for thoughts."""
        thoughts = 0 if self.thinking == "off" else THOUGHT_TOKENS
        return self.answer_tokens or num_needed + thoughts


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that ends with the user's turn.

    `watched`: a text that occurs once in the messages; the respondent says, if it can, which
    layers had its first token in their index list in the row that wrote the answer's first token.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    watched: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    text        without thoughts
    listed      layer -> whether its list held the watched token; empty if every key was attended;
                None where nobody looked
    num_cached_tokens is part of num_prompt_tokens.
    """

    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    finish_reason: str = "stop"
    listed: Mapping[int, bool] | None = None


class Respondent(Protocol):
    """Somebody who answers. `label` names the model, `place` says where it runs."""

    @property
    def label(self) -> str:
        """The model's name."""
        ...

    @property
    def place(self) -> str:
        """A URL, or "in process"."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and answer together, in tokens; None if it does not say."""
        ...

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt that the conversation becomes."""
        ...

    def ask(self, questions: Sequence[Question], progress: Progress) -> list[Answer]:
        """The answers, one per question, in their order."""
        ...

    def close(self) -> None:
        """Nothing more will be asked."""
        ...


def without_thoughts(text: str) -> str:
    """What follows the thinking block; nothing if the block was never closed."""
    _, closed, rest = text.rpartition(THINK_END)
    if not closed and THINK_START in text:
        return ""
    return rest.strip()


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant's message."""
    return {"role": "assistant", "content": text}
