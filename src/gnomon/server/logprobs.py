"""Log-probabilities in the two shapes of the API, and those of the prompt in vLLM's.

In:  TokenLogprobs of the engine (natural logarithms), the tokenizer for the names of tokens.
Out: answer_types structs. JSON has no infinity: below −9999 everything is −9999, as at OpenAI's.
A token's text may be half a character; then `token` shows U+FFFD and `bytes` has the truth.
Not here: the computation (engine/sampler.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from gnomon.engine.messages import TokenLogprobs
from gnomon.server.answer_types import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from gnomon.text.tokenizer import Tokenizer

LEAST = -9999.0


def chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """The shape of chat completions: one entry per generated token."""
    return ChatLogprobs([_content(token, tokenizer) for token in tokens])


def prompt_logprobs(tokens: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> PromptLogprobs:
    """One entry per prompt token, the first one null: token id to its log-probability."""
    return [None if token is None else _ranked(token, tokenizer) for token in tokens]


class CompletionLogprobsWriter:
    """The shape of text completions, chunk after chunk: it knows how long the text is so far.

    `text_offset` counts the characters of the tokens before, U+FFFD for a character that is cut.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """The entries of the next tokens; None stands for a first prompt token."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if item is None else _finite(item.logprob) for item in logprobs],
            tokens=[_text(token_id, self._tokenizer) for token_id in token_ids],
            top_logprobs=[None if item is None else self._top(item) for item in logprobs],
        )

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """The best tokens and the chosen one. Tokens that read alike share the better value."""
        best: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            text = _text(token_id, self._tokenizer)
            best[text] = max(_finite(logprob), best.get(text, LEAST))
        return best


def _content(token: TokenLogprobs, tokenizer: Tokenizer) -> ContentLogprob:
    data = tokenizer.token_bytes(token.token_id)
    return ContentLogprob(
        data.decode("utf-8", errors="replace"),
        _finite(token.logprob),
        list(data),
        [_top(token_id, logprob, tokenizer) for token_id, logprob in token.top],
    )


def _top(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(data.decode("utf-8", errors="replace"), _finite(logprob), list(data))


def _ranked(token: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    ranked = {
        str(token_id): PromptLogprob(_finite(logprob), place, _text(token_id, tokenizer))
        for place, (token_id, logprob) in enumerate(token.top, 1)
    }
    own = PromptLogprob(_finite(token.logprob), token.rank, _text(token.token_id, tokenizer))
    return {str(token.token_id): own, **ranked}


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
