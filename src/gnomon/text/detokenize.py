"""Token ids to text as they come, one detokenizer per sequence.

In:  the token ids of one sequence, in any portions.
Out: for each portion, the text that is certain. The bytes of a character that later tokens can
     still complete are held back; they become U+FFFD only when the sequence has ended.
Law: the texts of all portions and of `finish` put together are `Tokenizer.decode` of all ids, for
     every way to cut the ids into portions. The cost is that of the portion, not of the sequence.
Not here: stop strings (stops.py), which look at the text that comes out of here.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from gnomon.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one sequence. State: at most three bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids if skip_special_tokens else frozenset()
        self._held = b""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these ids make certain."""
        skipped = self._skipped
        token_bytes = self._tokenizer.token_bytes
        new = [token_bytes(index) for index in token_ids if index not in skipped]
        data = self._held + b"".join(new)
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        return text

    def finish(self) -> str:
        """What was held back: nothing, or one U+FFFD for an unfinished character."""
        held, self._held = self._held, b""
        return held.decode("utf-8", errors="replace")
