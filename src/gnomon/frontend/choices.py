"""From one client request to the engine's requests, and from their tokens back to text.

In:  prompt ids and SamplingParams (n, stop strings); then OutputDeltas of the engine.
Out: n EngineRequests, choices 1 .. n-1 as forks of choice 0, so that the prompt is computed once;
     Deltas with text, and the ids of choices that a stop string has ended, to be aborted.
Rules: the token that ended a choice (an end token, a stop token) is not part of its text unless
include_stop_str_in_output is set. Stop strings count only after min_tokens tokens. A choice that
ends by a stop string and by length with the same token has ended by the stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gnomon.engine.messages import EngineRequest, OutputDelta
from gnomon.engine.sampling_params import SamplingParams
from gnomon.frontend.outputs import Delta
from gnomon.text.detokenize import Detokenizer
from gnomon.text.stops import StopMatcher
from gnomon.text.tokenizer import Tokenizer


def choice_requests(first: EngineRequest) -> list[EngineRequest]:
    """`first` and its forks, params.n in all. The fork's ids are the first one's with "#1" etc."""
    alone = msgspec.structs.replace(first.params, prompt_logprobs=None)
    return [first] + [
        msgspec.structs.replace(
            first,
            request_id=f"{first.request_id}#{choice}",
            choice=choice,
            fork_of=first.request_id,
            params=alone,
        )
        for choice in range(1, first.params.n)
    ]


class ChoiceText:
    """The text of one choice as it grows."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.is_finished = False
        self._params = params
        self._num_tokens = 0
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens
            )
        self._stops = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)

    def feed(self, request_id: str, delta: OutputDelta) -> Delta:
        """The Delta of an OutputDelta; ends the choice if a stop string is complete."""
        ids = delta.token_ids
        is_ended_by_token = delta.finish_reason == "stop"
        is_hidden = is_ended_by_token and not self._params.include_stop_str_in_output
        shown = ids[:-1] if is_hidden else ids
        num_taken, stop = len(ids), None
        if self._detokenizer is None:
            text = ""
        elif not self._params.stop:
            text = self._detokenizer.feed(shown)
        else:
            text, stop, num_read = self._read(self._detokenizer, shown)
            num_taken = len(ids) if stop is None else num_read
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        if stop is None and reason is not None:
            tail, stop = self._finish()
            text += tail
        if stop is not None:
            reason, stop_reason = "stop", stop
            ids = ids[:num_taken]
        self._num_tokens += len(ids)
        self.is_finished = reason is not None
        logprobs, prompt_logprobs = delta.logprobs, delta.prompt_logprobs
        return Delta(
            request_id,
            self.index,
            text,
            tuple(ids),
            None if logprobs is None else tuple(logprobs[: len(ids)]),
            reason,
            stop_reason,
            delta.error,
            delta.num_prompt_tokens,
            delta.num_cached_tokens,
            None if prompt_logprobs is None else tuple(prompt_logprobs),
            delta.queue_s,
        )

    def _read(self, detokenizer: Detokenizer, ids: Sequence[int]) -> tuple[str, str | None, int]:
        """(text, the stop string that ended it, tokens read) where there are stop strings."""
        shown = []
        for count, token_id in enumerate(ids, 1):
            is_armed = self._num_tokens + count >= self._params.min_tokens
            step = self._stops.feed(detokenizer.feed((token_id,)), is_armed=is_armed)
            shown.append(step.text)
            if step.stop is not None:
                return "".join(shown), step.stop, count
        return "".join(shown), None, len(ids)

    def _finish(self) -> tuple[str, str | None]:
        """What was held back: (text, the stop string that it completes)."""
        if self._detokenizer is None:
            return "", None
        step = self._stops.feed(self._detokenizer.finish())
        return (step.text, step.stop) if step.stop else (step.text + self._stops.finish(), None)


class ChoiceSet:
    """All choices of one client request."""

    def __init__(self, first: EngineRequest, tokenizer: Tokenizer | None) -> None:
        self.request_id = first.request_id
        self.requests = choice_requests(first)
        self._open = {
            request.request_id: ChoiceText(request.choice, request.params, tokenizer)
            for request in self.requests
        }

    @property
    def open_ids(self) -> list[str]:
        """The engine's ids of the choices that have not ended."""
        return list(self._open)

    @property
    def has_open(self) -> bool:
        """Whether a choice has not ended."""
        return bool(self._open)

    def feed(self, delta: OutputDelta) -> tuple[Delta | None, bool]:
        """(the Delta, or None if its choice had ended; whether to abort it in the engine)."""
        choice = self._open.get(delta.request_id)
        if choice is None:
            return None, False
        made = choice.feed(self.request_id, delta)
        if choice.is_finished:
            del self._open[delta.request_id]
        return made, choice.is_finished and delta.finish_reason is None
