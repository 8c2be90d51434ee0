"""What was kept away from training: the rule by which the small built-in model was trained.

In:  a key ("silver lamp") or a pair of operands ("12+7").
Out: whether it is of the eighth of all texts that training never showed.
The rule is a checksum, so that training and evaluation need to agree on nothing but this line.
For models that others trained it means nothing and does no harm.
"""

from __future__ import annotations

import zlib

HELD_OUT_OF = 8


def is_held_out(text: str) -> bool:
    """Whether text is for measuring only."""
    return zlib.crc32(text.encode()) % HELD_OUT_OF == 0
