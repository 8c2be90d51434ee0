"""The seam between decoded text and what a client is told: events, and the parser that makes them.

In:  the text of one choice as it becomes certain, with the token ids that it came from.
Out: events in order. `OutputParser` is what an encoding hands out for one choice of one request;
     `PlainParser` calls everything content.
Law for every parser: the events do not depend on how the text was cut into portions, except that
     neighbouring deltas of one kind may be cut differently.
Not here: stop strings (they are matched before), the shapes of the API (server).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Call number `index` (from 0) of this choice begins; its name is complete."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of the arguments of call number `index`."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Reads the output of one choice. Stateful; one parser per choice."""

    def feed(self, text_delta: str, token_ids: Sequence[int]) -> list[Event]:
        """Take text that has become certain, and the ids sampled since the last call.

        Token ids let a parser know a control token from the same letters; the text of a token may
        come with a later call than its id, when a character spans tokens.
        """
        ...

    def finish(self) -> list[Event]:
        """The output has ended; give out whatever was held back."""
        ...


class PlainParser:
    """Everything is content. Holds nothing back."""

    def feed(self, text_delta: str, token_ids: Sequence[int]) -> list[Event]:
        """One content delta, or nothing for the empty text."""
        return [ContentDelta(text_delta)] if text_delta else []

    def finish(self) -> list[Event]:
        """Nothing was held back."""
        return []
