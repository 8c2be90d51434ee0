"""What a stream says about usage, how its tokens are bundled, and what only a stream can ask for.

In:  a checked request.   Out: `UsageReport`, `interval_of`; RequestError for contradictions.
Not here: the chunks (chat.py, completions.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from gnomon.errors import RequestError
from gnomon.server.answer_types import Usage
from gnomon.server.generation import Generation
from gnomon.server.request_fields import UNSUPPORTED, GenerationRequest

WHOLE_INTERVAL = 16
"""Of answers that are sent whole: nobody sees their tokens come."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Whether the last chunk has the usage, and whether every chunk has it."""

    at_end: bool
    always: bool

    def so_far(self, generation: Generation) -> Usage | UnsetType | None:
        """The field `usage` of a chunk: null before the end, as OpenAI sends it."""
        if self.always:
            return generation.usage()
        return None if self.at_end else UNSET


def interval_of(request: GenerationRequest, stream_interval: int) -> int:
    """How many tokens of a choice may wait for each other before somebody looks at them."""
    if request.stop:
        return 1  # found late, a stop string would have cost steps for nothing
    return stream_interval if request.stream else WHOLE_INTERVAL


def usage_report(request: GenerationRequest) -> UsageReport:
    """Check the options of a stream."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestError(
            "stream_options is given but stream is not true; send both or neither",
            param="stream_options",
            code="invalid_value",
        )
    at_end = options is not None and bool(options.include_usage)
    always = options is not None and bool(options.continuous_usage_stats)
    if always and not at_end:
        raise RequestError(
            "stream_options.continuous_usage_stats needs include_usage: true",
            param="stream_options.continuous_usage_stats",
            code="invalid_value",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs cannot be streamed; send stream: false",
            param="prompt_logprobs",
            code=UNSUPPORTED,
        )
    return UsageReport(at_end, always)
