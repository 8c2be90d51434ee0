"""How much time a verification has.

In:  minutes, a clock.
Out: TimeBudget: what is left, and whether anything is.
Not here: what the time is spent on (rounds.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]  # seconds, monotonic


@dataclass(slots=True)
class TimeBudget:
    """`minutes` from now on."""

    minutes: float
    clock: Clock = time.monotonic
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def seconds_left(self) -> float:
        """Negative when time is up."""
        return self.minutes * 60.0 - (self.clock() - self._began)

    @property
    def is_over(self) -> bool:
        """Whether time is up."""
        return self.seconds_left <= 0.0
