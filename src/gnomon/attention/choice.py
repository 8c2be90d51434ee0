"""Providers as dispatch sees them, and what it decided: a Choice for each operator.

In:  nothing but names, verdicts and reasons.
Out: Provider, the protocol of a family of kernels; Choice; the rows that `gnomon explain` prints.
Not here: choosing (dispatch.py), needs and requirements (requirement.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gnomon.attention.geometry import RowAxis
from gnomon.attention.requirement import OpNeed, Verdict


class Provider(Protocol):
    """A family of kernels. Lower ``rank`` is preferred."""

    @property
    def name(self) -> str:
        """What flags and tables call it."""

    @property
    def rank(self) -> int:
        """Its place among those that can."""

    def supports(self, op: str, need: OpNeed) -> Verdict:
        """Whether this provider's kernel can do ``op`` under ``need``."""

    def scratch_bytes(self, op: str, need: OpNeed) -> int:
        """Arena bytes that one call may use at most, 0 if it owns none."""

    def prepare(self, axis: RowAxis) -> object | None:
        """A schedule for an axis, made once a step and shared by the layers; None if none."""

    def kernel(self, op: str, need: OpNeed | None = None) -> Callable[..., Any]:
        """The function that runs ``op`` under ``need`` (signature: spec.SPECS[op])."""

    def fusion(self, name: str, need: OpNeed) -> Callable[..., Any] | None:
        """The function that stands for the operators of FUSIONS[name], to the bit; or None."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The provider of one operator, why it was taken and why the others were not.

    ``unpacked``: of sparse_mla over packed latents in prefill: who attends a context that was
    unpacked first (ops/workspace.py), where steps have many rows.
    """

    op: str
    provider: Provider
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    unpacked: Choice | None = None


Ranking = Callable[[str, OpNeed], tuple[Sequence[str], str]]
"""(operator, need) -> names from the fastest on, and where that was measured; () if it was not."""


def explain_rows(choices: Sequence[Choice]) -> list[tuple[str, str, str, str]]:
    """(operator, provider, why, what was rejected and why), one row per operator.

    A second one where an unpacked context has a provider of its own choice.
    """
    rows = []
    for choice in choices:
        rows.append(_row(choice.op, choice))
        if choice.unpacked is not None:
            rows.append(_row(f"{choice.op} of many rows, context unpacked", choice.unpacked))
    return rows


def _row(name: str, choice: Choice) -> tuple[str, str, str, str]:
    rejected = "; ".join(f"{other}: {why}" for other, why in choice.rejected)
    return name, choice.provider.name, choice.reason, rejected
