"""How rough an engine's arithmetic is, and what two runs of it may differ by.

In:  what an engine consists of (Survey).
Out: a Roughness; None for float32 and finer, whose runs agree to the last bits (margins.py).
Numbers are for logits of standard deviation 1, from random models of two to eight layers, each
twice what was seen of the worst row: `logits`, the root mean square difference of a row, as between
two precisions; `keys`, the share of a row's keys that are others where scores are equal but for
rounding; `experts`, the share of all rows whose experts are others, by the same; `codes`, how far
values are off before a cache rounds them.
Not here: comparing (rough_comparison.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.engine.assembly import Survey

HALF_TOLERANCE = 0.06  # 16-bit arithmetic or caches: twice the worst row of random models
FP8_TOLERANCE = 0.15  # the same of 8-bit latents; FP8 below is of products of 8-bit rows
WIDEST = 3.0  # a gap between two logits, in units of the difference that is allowed


@dataclass(frozen=True, slots=True)
class Roughness:
    """What may differ (module docstring)."""

    logits: float
    keys: float
    experts: float
    codes: float


HALF = Roughness(logits=HALF_TOLERANCE, keys=0.12, experts=0.16, codes=0.09)
FP8 = Roughness(logits=0.28, keys=0.4, experts=0.56, codes=0.65)


def roughness_of(found: Survey) -> Roughness | None:
    """Of the engine that would be built."""
    if found.resolved.has_fp8:
        return FP8
    return HALF if found.resolved.dtype.itemsize < 4 else None
