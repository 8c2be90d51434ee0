"""What comes out of the front of the house: whole answers offline, deltas while streaming.

Offline: one RequestOutput per prompt, one CompletionOutput per choice, under the names that vLLM's
users know. Streaming: Delta, what one choice gained. Text is final when it is here: stop strings
are cut, bytes of an incomplete character are held back until they are complete.
Log-probabilities are of the model's raw distribution (engine/sampling_logprobs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from gnomon.engine.messages import FinishReason, TokenLogprobs


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained. After one with a finish_reason, no other of its choice comes.

    A Struct, because one is made for every token of every stream: a frozen dataclass of so many
    fields costs six times as much.

    token_ids       new tokens, the one that ended the choice included
    text            text that has become certain; it may lag behind the tokens
    logprobs        one per new token, if asked for
    stop_reason     the stop string or stop token id that ended it; None for an end token
    prompt_logprobs in the first delta of choice 0, if asked for; None for the prompt's first token
    queue_s         with the first token: seconds that the request waited for its first step
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    queue_s: float = 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One choice, complete."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None

    def add(self, delta: Delta) -> None:
        """Append what the choice gained."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.error = delta.error


@dataclass(slots=True)
class RequestOutput:
    """One prompt with all its choices. `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return all(output.is_finished for output in self.outputs)

    def add(self, delta: Delta) -> None:
        """Append what one choice gained."""
        self.outputs[delta.index].add(delta)
        if delta.index == 0:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
