"""Respondents whose answers are known: perfect ones, wrong ones, whatever a function says.

`Scripted` counts a token for every four characters, keeps what it was asked, and answers with what
a function makes of the last message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gnomon.evaluate.respondent import Answer, Message, Progress, Question


class Scripted:
    """Answers by a function of the question."""

    label = "scripted"
    place = "a test"

    def __init__(
        self,
        reply: Callable[[str], str],
        max_model_len: int | None = None,
        listed: Mapping[int, bool] | None = None,
    ) -> None:
        self.asked: list[Question] = []
        self.rounds: list[int] = []
        self.max_model_len = max_model_len
        self._reply, self._listed = reply, listed

    def num_tokens(self, messages: Sequence[Message]) -> int:
        return 3 + sum(len(message["content"]) for message in messages) // 4

    def ask(self, questions: Sequence[Question], progress: Progress) -> list[Answer]:
        self.asked += questions
        self.rounds.append(len(questions))
        progress(len(questions), len(questions))
        return [
            Answer(
                text=self._reply(question.messages[-1]["content"]),
                num_prompt_tokens=self.num_tokens(question.messages),
                num_output_tokens=2,
                num_cached_tokens=1,
                finish_reason="stop" if number else "length",
                listed=self._listed,
            )
            for number, question in enumerate(questions)
        ]

    def close(self) -> None:
        pass


def unheard(done: int, total: int) -> None:
    """A progress callback for nobody."""
