"""The events of one stream as JSON: what all of them have in common is encoded once.

In:  a chunk whose `choices` are empty; then the choice that each event brings.
Out: the bytes that encoding the chunk with that choice in it would give.
Not here: the `data:` lines (stream.py).
"""

from __future__ import annotations

import msgspec

_EMPTY = b'"choices":[]'  # cannot be part of a JSON string: there its quotes would be escaped


class Envelope:
    """Wraps choices; `chunk` is a ChatChunk or CompletionAnswer without any."""

    def __init__(self, chunk: msgspec.Struct) -> None:
        self._encode = msgspec.json.Encoder().encode
        before, _, after = self._encode(chunk).partition(_EMPTY)
        self._before = before + _EMPTY[:-1]
        self._after = _EMPTY[-1:] + after

    def around(self, choice: msgspec.Struct) -> bytes:
        """The event that brings this choice."""
        return self._before + self._encode(choice) + self._after
