"""Dispatch: which provider runs which operator, and why.

In:  what the step needs (device, dtype, dims, layouts), the providers at hand, and perhaps names
     that the user forces.
Out: one Choice per operator, bound into Operators; rows for the table of `gnomon explain`.
`choose` is a pure function: same arguments, same answer; it imports and measures nothing.
Not here: the kernels (providers/), needs and requirements (requirement.py), what a provider and a
choice are (choice.py), the axis checks (ops/operators.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gnomon.attention.choice import Choice, Provider, Ranking, explain_rows
from gnomon.attention.geometry import RowAxis
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.fusions import FUSIONS
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.products import TORCH, Products
from gnomon.attention.ops.workspace import UnpackedMla, move_slots
from gnomon.attention.requirement import OpNeed, Requirement, Sizes, Verdict
from gnomon.errors import ConfigError, UnsupportedError

__all__ = [
    "OPERATORS",
    "Choice",
    "KernelSet",
    "OpNeed",
    "Provider",
    "Ranking",
    "Requirement",
    "Sizes",
    "Verdict",
    "bind_operators",
    "choose",
    "explain_rows",
]

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
    "quantise_rows",
    "silu_quantise",
    "linear_fp8",
    "moe_fp8",
)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """A provider made of plain functions: kernels by operator name, requirements as data.

    ``fixed``: kernels that take the place of their namesakes where the need is deterministic.
    ``variants``: by operator, a function of the need that gives the kernel to take, say one for
    the cache's layout, or None for the usual one. It is asked first.
    ``fusions``: kernels that stand for several operators (ops/fusions.py). ``by_batch``: those of
    them whose bits may hang on the number of rows; none is given where the need is deterministic.
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
    fusions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    by_batch: frozenset[str] = frozenset()

    def supports(self, op: str, need: OpNeed) -> Verdict:
        """Compare the need with the operator's own requirement, or with the provider's."""
        if op not in self.kernels:
            return Verdict(False, f"has no kernel for {op}", has_kernel=False)
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

    def fusion(self, name: str, need: OpNeed) -> Callable[..., Any] | None:
        """The kernel that stands for the operators of fusion ``name``, if there is one."""
        if need.is_deterministic and name in self.fixed:
            return self.fixed[name]
        if need.is_deterministic and name in self.by_batch:
            return None
        return self.fusions.get(name)


def choose(
    op: str,
    need: OpNeed,
    available: Sequence[Provider],
    forced: str | None = None,
    ranking: Ranking | None = None,
) -> Choice:
    """The preferred provider that supports ``op``, or the forced one.

    Those that ``ranking`` names come first, in its order; the others follow by their rank.
    Raises ConfigError for a name that does not exist, UnsupportedError if the forced provider, or
    every provider, refuses; both say what would work instead.
    """
    if op not in OPERATORS:
        raise ConfigError(f"no operator is called {op!r}; there are: {', '.join(OPERATORS)}")
    measured, source = ((), "") if ranking is None else ranking(op, need)
    place = {name: index for index, name in enumerate(measured)}
    ranked = sorted(available, key=lambda p: (place.get(p.name, len(place)), p.rank, p.name))
    verdicts = [(provider, provider.supports(op, need)) for provider in ranked]
    able = [provider for provider, verdict in verdicts if verdict.is_ok]
    refusals = tuple((p.name, v.reason) for p, v in verdicts if not v.is_ok and v.has_kernel)
    if forced is not None:
        return _forced(op, forced, verdicts, able)
    if not able:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals) or "none is installed"
        raise UnsupportedError(f"no provider can run {op} for {need.words()}: {reasons}")
    slower = tuple((provider.name, f"ranked after {able[0].name}") for provider in able[1:])
    return Choice(op, able[0], _reason(able[0].name, measured, source), refusals + slower)


def _reason(taken: str, measured: Sequence[str], source: str) -> str:
    """Why the first of those that can was taken."""
    if taken not in measured:
        return "first in rank of those that can"
    faster = ", ".join(measured[: measured.index(taken)])
    return f"next after {faster}, which cannot serve here" if faster else source


def bind_operators(
    need: OpNeed,
    available: Sequence[Provider],
    forced: str | Mapping[str, str] | None = None,
    ranking: Ranking | None = None,
) -> tuple[Operators, tuple[Choice, ...]]:
    """Choose every operator and bind the kernels. ``forced``: one name for all, or per operator."""
    by_op = {op: forced for op in OPERATORS} if isinstance(forced, str) else dict(forced or {})
    unknown = sorted(set(by_op) - set(OPERATORS))
    if unknown:
        raise ConfigError(
            f"no operator is called {unknown[0]!r}; there are: {', '.join(OPERATORS)}"
        )
    choices = [choose(op, need, available, by_op.get(op), ranking) for op in OPERATORS]
    kernels = {c.op: c.provider.kernel(c.op, need) for c in choices}
    names = {c.op: c.provider.name for c in choices}
    fused = _fusions(choices, need)
    plain = _plain_need(need)
    unpacked = None
    if plain is not None:
        try:
            attend = choose("sparse_mla", plain, available, by_op.get("sparse_mla"), ranking)
        except UnsupportedError:
            pass  # a forced provider that reads packed latents alone
        else:
            move = fused.get("move_slots", move_slots)
            kernel = attend.provider.kernel("sparse_mla", plain)
            unpacked = UnpackedMla(kernel, kernels["context_gather"], move)
            place = OPERATORS.index("sparse_mla")
            choices[place] = replace(choices[place], unpacked=attend)
    return Operators(kernels, names, fused, unpacked, _products(choices, need)), tuple(choices)


def _plain_need(need: OpNeed) -> OpNeed | None:
    """What prefill over an unpacked context needs, where the latents are packed on a GPU."""
    is_packed = need.latent_layout is not None and need.latent_layout.startswith("fp8")
    if need.device != "cuda" or need.dims is None or not is_packed or need.phase == "decode":
        return None
    if need.is_deterministic or need.dtype.itemsize != 2:
        return None  # the packed kernels' own bits are asked for, or nothing is gained
    width = need.dims.kv_lora_rank + need.dims.qk_rope_head_dim
    return replace(need, latent_layout=PlainLayout(need.dtype, width).id)


def _products(choices: Sequence[Choice], need: OpNeed) -> Products:
    """Who multiplies with plain weights: torch, or kernels of whoever serves the norms.

    On a CPU rows are padded instead (row_bits.py); a GPU's library rounds by the number of rows.
    """
    if not need.is_deterministic:
        return TORCH
    provider = next(choice.provider for choice in choices if choice.op == "rms_norm")
    linear, by_head = (provider.fusion(name, need) for name in ("linear", "multiply_heads"))
    if linear is not None and by_head is not None:
        return Products(linear, by_head, is_fixed=True)
    if need.device != "cpu":
        raise UnsupportedError(
            f"provider {provider.name!r} has no matrix products whose bits do not hang on the "
            f"batch on {need.device}; leave deterministic out, or leave the choice of providers "
            "to auto (triton has them)"
        )
    return TORCH


def _fusions(choices: Sequence[Choice], need: OpNeed) -> dict[str, Callable[..., Any]]:
    """Kernels that stand for several operators, where one provider serves all of them."""
    serving = {choice.op: choice.provider for choice in choices}
    bound = {}
    for name, parts in FUSIONS.items():
        provider = serving[parts[0]]
        if all(serving[part] is provider for part in parts):
            kernel = provider.fusion(name, need)
            if kernel is not None:
                bound[name] = kernel
    return bound


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
    others = tuple(
        (p.name, f"{forced} was forced") for p, v in verdicts if p.name != forced and v.has_kernel
    )
    return Choice(op, provider, "forced", others)
