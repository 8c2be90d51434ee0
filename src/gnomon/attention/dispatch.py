"""Dispatch: which provider runs which operator, and why.

In:  what the step needs (device, dtype, dims, layouts), the providers at hand, and perhaps names
     that the user forces.
Out: one Choice per operator, bound into Operators; rows for the table of `gnomon explain`.
`choose` is a pure function: same arguments, same answer; it imports and measures nothing.
Not here: the kernels (providers/), the axis checks (ops/operators.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gnomon.attention.geometry import RowAxis
from gnomon.attention.ops.operators import Operators
from gnomon.attention.routes import AttentionDims
from gnomon.errors import ConfigError, UnsupportedError

OPERATORS = (
    "rms_norm",
    "layer_norm",
    "rope",
    "latent_write",
    "index_prepare",
    "index_scores",
    "index_scores_paged",
    "topk",
    "sparse_mla",
    "dense_mha",
    "context_gather",
    "lse_merge",
    "moe",
)


@dataclass(frozen=True, slots=True)
class OpNeed:
    """What a run asks of every operator. Layout ids are those of the pools ("bf16_576").

    ``is_deterministic``: a row's bits hang on its own data alone, whatever rows run beside it.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    dims: AttentionDims | None = None
    latent_layout: str | None = None
    index_layout: str | None = None
    is_graph: bool = False
    is_deterministic: bool = False

    def layout_of(self, op: str) -> str | None:
        """The layout whose bytes this operator touches, if it touches any."""
        if op in ("latent_write", "sparse_mla", "context_gather"):
            return self.latent_layout
        if op in ("index_prepare", "index_scores_paged"):
            return self.index_layout
        return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a provider can do an operator under a need, and why not."""

    is_ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a kernel asks of its surroundings, as data. None means: anything.

    ``fixed_dtypes``: where it can keep a row's bits apart from the other rows (is_deterministic).
    """

    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    layouts: frozenset[str] | None = None
    can_capture: bool = False
    fixed_dtypes: frozenset[torch.dtype] = frozenset()

    def check(self, op: str, need: OpNeed) -> Verdict:
        """Compare with a need; the reason names the first thing that does not fit."""
        layout = need.layout_of(op)
        if self.devices is not None and need.device not in self.devices:
            return Verdict(False, f"runs on {_names(self.devices)}, not on {need.device}")
        if self.dtypes is not None and need.dtype not in self.dtypes:
            return Verdict(False, f"computes in {_names(self.dtypes)}, not in {need.dtype}")
        if self.layouts is not None and layout is not None and layout not in self.layouts:
            return Verdict(False, f"reads layouts {_names(self.layouts)}, not {layout}")
        if need.is_graph and not self.can_capture:
            return Verdict(False, "cannot run inside a captured graph")
        if need.is_deterministic and need.dtype not in self.fixed_dtypes:
            return Verdict(False, f"has row bits that hang on the batch in {need.dtype}")
        return Verdict(True, "meets every requirement")


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


@dataclass(frozen=True, slots=True)
class KernelSet:
    """A provider made of plain functions: kernels by operator name, requirements as data.

    ``fixed``: kernels that take the place of their namesakes where the need is deterministic.
    ``variants``: by operator, a function of the need that gives the kernel to take, say one for
    the cache's layout, or None for the usual one. It is asked first.
    """

    name: str
    rank: int
    kernels: Mapping[str, Callable[..., Any]]
    requirement: Requirement = field(default_factory=Requirement)
    special: Mapping[str, Requirement] = field(default_factory=dict)
    fixed: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    variants: Mapping[str, Callable[[OpNeed], Callable[..., Any] | None]] = field(
        default_factory=dict
    )

    def supports(self, op: str, need: OpNeed) -> Verdict:
        """Compare the need with the operator's own requirement, or with the provider's."""
        if op not in self.kernels:
            return Verdict(False, f"has no kernel for {op}")
        return self.special.get(op, self.requirement).check(op, need)

    def scratch_bytes(self, op: str, need: OpNeed) -> int:
        """Plain functions allocate what they need from torch and own no arena."""
        return 0

    def prepare(self, axis: RowAxis) -> object | None:
        """Plain functions need no schedule."""
        return None

    def kernel(self, op: str, need: OpNeed | None = None) -> Callable[..., Any]:
        """The function behind ``op``: its variant for the need, or with fixed bits, if any."""
        variant = self.variants[op](need) if need is not None and op in self.variants else None
        if variant is not None:
            return variant
        if need is not None and need.is_deterministic and op in self.fixed:
            return self.fixed[op]
        return self.kernels[op]


@dataclass(frozen=True, slots=True)
class Choice:
    """The provider of one operator, why it was taken and why the others were not."""

    op: str
    provider: Provider
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


def choose(
    op: str, need: OpNeed, available: Sequence[Provider], forced: str | None = None
) -> Choice:
    """The preferred provider that supports ``op``, or the forced one.

    Raises ConfigError for a name that does not exist, UnsupportedError if the forced provider, or
    every provider, refuses; both say what would work instead.
    """
    if op not in OPERATORS:
        raise ConfigError(f"no operator is called {op!r}; there are: {', '.join(OPERATORS)}")
    ranked = sorted(available, key=lambda provider: (provider.rank, provider.name))
    verdicts = [(provider, provider.supports(op, need)) for provider in ranked]
    able = [provider for provider, verdict in verdicts if verdict.is_ok]
    refusals = tuple((p.name, v.reason) for p, v in verdicts if not v.is_ok)
    if forced is not None:
        return _forced(op, forced, verdicts, able)
    if not able:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals) or "none is installed"
        raise UnsupportedError(f"no provider can run {op} for {need}: {reasons}")
    slower = tuple((provider.name, f"ranked after {able[0].name}") for provider in able[1:])
    return Choice(op, able[0], "first in rank of those that can", refusals + slower)


def bind_operators(
    need: OpNeed,
    available: Sequence[Provider],
    forced: str | Mapping[str, str] | None = None,
) -> tuple[Operators, tuple[Choice, ...]]:
    """Choose every operator and bind the kernels. ``forced``: one name for all, or per operator."""
    by_op = {op: forced for op in OPERATORS} if isinstance(forced, str) else dict(forced or {})
    unknown = sorted(set(by_op) - set(OPERATORS))
    if unknown:
        raise ConfigError(
            f"no operator is called {unknown[0]!r}; there are: {', '.join(OPERATORS)}"
        )
    choices = tuple(choose(op, need, available, by_op.get(op)) for op in OPERATORS)
    return Operators({c.op: c.provider.kernel(c.op, need) for c in choices}), choices


def explain_rows(choices: Sequence[Choice]) -> list[tuple[str, str, str, str]]:
    """(operator, provider, why, what was rejected and why), one row per operator."""
    return [
        (
            choice.op,
            choice.provider.name,
            choice.reason,
            "; ".join(f"{name}: {why}" for name, why in choice.rejected),
        )
        for choice in choices
    ]


def _forced(
    op: str,
    forced: str,
    verdicts: Sequence[tuple[Provider, Verdict]],
    able: Sequence[Provider],
) -> Choice:
    found = [(p, v) for p, v in verdicts if p.name == forced]
    names = ", ".join(p.name for p, _ in verdicts)
    if not found:
        raise ConfigError(f"no provider is called {forced!r}; at hand are: {names}")
    provider, verdict = found[0]
    if not verdict.is_ok:
        remedy = ", ".join(p.name for p in able) or "none of those at hand"
        raise UnsupportedError(
            f"provider {forced!r} was forced for {op} but {verdict.reason}; these can: {remedy}. "
            "Force one of them, or force nothing"
        )
    others = tuple((p.name, f"{forced} was forced") for p, _ in verdicts if p.name != forced)
    return Choice(op, provider, "forced", others)


def _names(values: frozenset[str] | frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(value) for value in values))
