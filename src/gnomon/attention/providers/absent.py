"""A provider that comes with gnomon and cannot run here: it refuses every need and says why.

In:  its name, its place among the others, the operators that it would serve, why it cannot.
Out: a Provider that `gnomon explain` can show and that a flag can name: the answer is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from gnomon.attention.axes import RowAxis
from gnomon.attention.dispatch import OpNeed, Verdict
from gnomon.errors import UnsupportedError


class AbsentProvider:
    """See the module docstring."""

    def __init__(self, name: str, rank: int, operators: Collection[str], reason: str) -> None:
        self.name = name
        self.rank = rank
        self._operators = frozenset(operators)
        self._reason = reason

    def supports(self, op: str, need: OpNeed) -> Verdict:
        """Never, for one reason."""
        return Verdict(False, self._reason, has_kernel=op in self._operators)

    def scratch_bytes(self, op: str, need: OpNeed) -> int:
        """None."""
        return 0

    def prepare(self, axis: RowAxis) -> object | None:
        """None."""
        return None

    def kernel(self, op: str, need: OpNeed | None = None) -> Callable[..., Any]:
        """UnsupportedError."""
        raise UnsupportedError(f"provider {self.name!r} {self._reason}; use another one for {op}")

    def fusion(self, name: str, need: OpNeed) -> Callable[..., Any] | None:
        """None."""
        return None
