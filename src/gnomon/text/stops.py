"""Stop strings over a stream of text.

In:  the stop strings of a request, then its text in any portions.
Out: for each portion, the text that may be shown: all but the longest end of it that could still
     become a stop string. When one is complete, the text up to it, and which one it was.
Rules: the stop string that is complete first wins; of several that end at the same character the
     one that comes first in the list. The text is cut where the stop string starts, or after it
     if the request wants to see it.
Cost: one pass over the text whatever the number of stop strings (Aho and Corasick, 1975), and one
     pass over the stop strings to prepare.
Not here: the limits below are enforced where requests come in (server).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MAX_STOP_STRINGS = 2048
MAX_STOP_CHARS = 16_384
"""All stop strings of one request together."""


@dataclass(frozen=True, slots=True)
class StopStep:
    """What came of a portion: the text to show now, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None


@dataclass(slots=True)
class _Node:
    """A prefix of stop strings: its length, its longest suffix that is one too, what ends here."""

    depth: int
    children: dict[str, int]
    suffix: int = 0
    ended: int | None = None


class StopMatcher:
    """Looks for stop strings in the text of one sequence.

    Stop strings must not be empty (ValueError); without any, text passes through.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty; it would end every text at once")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._nodes = _build(self._stops)
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, is_armed: bool = True) -> StopStep:
        """Take the next portion of text.

        While `is_armed` is False (min_tokens) a complete stop string is passed over, but the
        matcher keeps reading: one that begins there and ends later is found.
        """
        if not self._stops:
            return StopStep(text)
        nodes = self._nodes
        state = self._state
        for place, character in enumerate(text):
            node = nodes[state]
            following = node.children.get(character)
            while following is None and state:
                state = node.suffix
                node = nodes[state]
                following = node.children.get(character)
            state = following or 0
            ended = nodes[state].ended
            if ended is not None and is_armed:
                return self._cut(self._held + text[: place + 1], self._stops[ended])
        while state and not nodes[state].children:
            state = nodes[state].suffix  # passed over while not armed: nothing longer begins so
        self._state = state
        whole = self._held + text
        num_shown = len(whole) - nodes[state].depth
        self._held = whole[num_shown:]
        return StopStep(whole[:num_shown])

    def finish(self) -> str:
        """The sequence has ended otherwise: the text that was held back."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _cut(self, whole: str, stop: str) -> StopStep:
        """`whole` ends with `stop`; all of it that was not shown before."""
        self._held, self._state = "", 0
        return StopStep(whole if self._include_stop else whole[: len(whole) - len(stop)], stop)


def _build(stops: tuple[str, ...]) -> list[_Node]:
    """The automaton. `ended` is the first stop in the list that is a suffix of the prefix."""
    nodes = [_Node(0, {})]
    for order, stop in enumerate(stops):
        state = 0
        for character in stop:
            following = nodes[state].children.get(character)
            if following is None:
                following = len(nodes)
                nodes.append(_Node(nodes[state].depth + 1, {}))
                nodes[state].children[character] = following
            state = following
        if nodes[state].ended is None:
            nodes[state].ended = order
    waiting = deque(nodes[0].children.values())
    while waiting:
        node = nodes[waiting.popleft()]
        for character, index in node.children.items():
            child = nodes[index]
            child.suffix = _longest_suffix(nodes, node, character)
            inherited = nodes[child.suffix].ended
            if inherited is not None and (child.ended is None or inherited < child.ended):
                child.ended = inherited
            waiting.append(index)
    return nodes


def _longest_suffix(nodes: list[_Node], parent: _Node, character: str) -> int:
    """Where the automaton goes on if the child of `parent` by `character` leads nowhere."""
    state = parent.suffix
    while state and character not in nodes[state].children:
        state = nodes[state].suffix
    return nodes[state].children.get(character, 0)
