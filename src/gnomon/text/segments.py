"""Prompts as segments: ordinary text and control tokens, kept apart from the first step on.

In:  pieces that an encoding writes one after the other.
Out: `RenderedPrompt`, the frozen value between an encoding and a tokenizer. A control token gets
     into a prompt only as a `special` segment, and only an encoding writes those; whatever a user
     wrote is `text`, which the tokenizer encodes without its added vocabulary. So no message can
     become a control token, however it is spelt.
Not here: token ids (tokenizer.py), the rules of the encodings (encodings/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Segment:
    """`value` is text of any length, or the spelling of one control token."""

    kind: Literal["text", "special"]
    value: str


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt before tokenization.

    Neighbouring text is one segment, because a tokenizer merges across the border of a user's
    words and the encoding's own. `starts_in_reasoning` says whether what the model writes first
    is a thought: the prompt has opened a thinking block and not closed it.
    """

    segments: tuple[Segment, ...]
    starts_in_reasoning: bool

    @property
    def text(self) -> str:
        """The prompt as a person reads it. Not for tokenization: control tokens look like text."""
        return "".join(segment.value for segment in self.segments)


class PromptBuilder:
    """Collects the segments of one prompt in order, joining neighbouring text."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._text: list[str] = []

    def text(self, value: str) -> None:
        """Append ordinary text; the empty text changes nothing."""
        if value:
            self._text.append(value)

    def special(self, name: str) -> None:
        """Append the control token that is spelt `name`."""
        self._end_text()
        self._segments.append(Segment("special", name))

    def build(self, *, starts_in_reasoning: bool) -> RenderedPrompt:
        """The prompt so far."""
        self._end_text()
        return RenderedPrompt(tuple(self._segments), starts_in_reasoning)

    def _end_text(self) -> None:
        if self._text:
            self._segments.append(Segment("text", "".join(self._text)))
            self._text.clear()
