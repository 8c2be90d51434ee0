"""A respondent that runs the model in this process, and can look at its index lists.

In:  an LLM, AskSettings; perhaps a tap of one's own, which may change what the layers attend.
Out: answers; for questions that watch a text, which layers listed its first token
     (answering_rows.py).
Questions go to the engine in groups of at most GROUP, which bounds what the tap keeps and is how
often progress is told.
Errors: ConfigError for a concurrency, which is a server's matter; those of LLM.chat.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.engine.runner import Taps
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import ConfigError, GnomonError
from gnomon.evaluate.answering_rows import AnsweringRows
from gnomon.evaluate.respondent import (
    Answer,
    AskSettings,
    Message,
    Progress,
    Question,
    without_thoughts,
)
from gnomon.frontend.llm import LLM
from gnomon.frontend.outputs import RequestOutput
from gnomon.text.encodings.base import ChatOptions
from gnomon.text.tokenizer import Tokenizer

GROUP = 32


class EngineRespondent:
    """The model of an LLM."""

    place = "in process"

    def __init__(self, llm: LLM, ask: AskSettings, tap: AnsweringRows | None = None) -> None:
        self.check(ask)
        self._llm = llm
        self._ask = ask
        self._tap = tap or AnsweringRows()
        self._options = (
            None if ask.thinking == "auto" else ChatOptions(thinking=ask.thinking == "on")
        )

    @staticmethod
    def check(ask: AskSettings) -> None:
        """Refuse what means nothing in process; can be asked before a model is loaded."""
        if ask.concurrency is not None:
            raise ConfigError(
                f"concurrency is {ask.concurrency} and no --url is given: in process, "
                "--max-num-seqs says how many requests run at the same time."
            )

    @property
    def label(self) -> str:
        """The model's name."""
        return self._llm.core.info.model_label

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._llm.core.info.max_model_len

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt."""
        language = self._llm.language
        rendered = language.chat.render(messages, options=self._options)
        return len(language.tokenizer.encode_segments(rendered.segments))

    def ask(self, questions: Sequence[Question], progress: Progress) -> list[Answer]:
        """The answers, in order."""
        answers: list[Answer] = []
        core = self._llm.core
        core.taps = Taps(selection=self._tap)
        try:
            for start in range(0, len(questions), GROUP):
                progress(start, len(questions))
                answers += self._ask_group(questions[start : start + GROUP], start)
                self._tap.clear()
        finally:
            core.taps = None
        progress(len(questions), len(questions))
        return answers

    def close(self) -> None:
        """End the engine."""
        self._llm.core.close()

    def _ask_group(self, questions: Sequence[Question], first: int) -> list[Answer]:
        params = [
            SamplingParams(
                temperature=self._ask.temperature,
                max_tokens=question.max_tokens,
                seed=self._ask.question_seed + number,
            )
            for number, question in enumerate(questions, first)
        ]
        outputs = self._llm.chat(
            [question.messages for question in questions],
            params,
            options=self._options,
            use_tqdm=False,
        )
        return [self._answer(*pair) for pair in zip(questions, outputs, strict=True)]

    def _answer(self, question: Question, output: RequestOutput) -> Answer:
        (choice,) = output.outputs
        if choice.error is not None or choice.finish_reason is None:
            raise GnomonError(f"a question was not answered: {choice.error}")
        listed = None
        if question.watched is not None:
            ids = output.prompt_token_ids
            wanted = first_token_of(question.watched, ids, self._llm.get_tokenizer())
            listed = self._tap.listed(output.request_id, len(ids) - 1, wanted)
        return Answer(
            text=without_thoughts(choice.text),
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=len(choice.token_ids),
            num_cached_tokens=output.num_cached_tokens,
            finish_reason=choice.finish_reason,
            listed=listed,
        )


def first_token_of(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """The position of the token with the first character of a text that occurs once in `ids`.

    It is the last position from which the rest still decodes to something with the text in it.
    """
    low, high = 0, len(ids)  # the rest from `low` holds the text, that from `high` does not
    if text not in tokenizer.decode(ids):
        raise GnomonError(f"the prompt does not hold {text!r}, which was to be watched")
    while high - low > 1:
        middle = (low + high) // 2
        if text in tokenizer.decode(ids[middle:]):
            low = middle
        else:
            high = middle
    return low
