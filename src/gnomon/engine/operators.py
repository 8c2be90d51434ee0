"""Operators of a run, bound by phase: for decode steps and for all others, and why each was taken.

In:  EngineConfig (attention_provider and the *_backend flags), what the run needs, the providers.
Out: BoundOperators. ConfigError for a name or a backend that cannot be meant, UnsupportedError for
     a forced provider that cannot run here; both before a weight is read, with what can.
A step decodes if every request has a row or few (its plan has a graph key); mixed steps count as
prefill. A backend flag forces those operators of its group that the provider has kernels for.
Not here: the choice itself (attention/dispatch.py), capturing (graphs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gnomon.attention.by_rows import OPERATORS_BY_ROWS, choose_by_rows
from gnomon.attention.dispatch import (
    OPERATORS,
    Choice,
    OpNeed,
    Provider,
    bind_operators,
    explain_rows,
)
from gnomon.attention.ops.fusions import FUSIONS
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import StepPlan
from gnomon.attention.providers.ranking import fastest, row_classes
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

PREFILL, DECODE = "prefill", "decode"
BACKENDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prefill_backend": ((PREFILL,), ("sparse_mla", "dense_mha")),
    "decode_backend": ((DECODE,), ("sparse_mla",)),
    "index_backend": ((PREFILL, DECODE), ("index_scores", "index_scores_paged")),
    "linear_backend": ((PREFILL, DECODE), ("linear_fp8",)),
    "moe_backend": ((PREFILL, DECODE), ("moe", "moe_fp8")),
}
"""Flag -> (phases, operators)."""
OF_FP8_WEIGHTS = frozenset({"linear_fp8", "moe_fp8"})
IN_SEGMENTS = frozenset(
    {
        "rms_norm",
        "layer_norm",
        "rope",
        "latent_write",
        "index_prepare",
        "moe",
        "quantise_rows",
        "silu_quantise",
        "linear_fp8",
        "moe_fp8",
    }
)
"""Operators that run between two attentions (prefill_graphs.py)."""


@dataclass(frozen=True, slots=True)
class BoundOperators:
    """Operators by phase.

    ``decode``: None where it is in no operator another set than ``usual``, which serves all other
    steps. ``graph``: those of decode if a CUDA graph may capture them all, else None.
    ``segments``: ``usual`` if a graph may capture what lies between two attentions, else None.
    """

    usual: Operators
    decode: Operators | None
    graph: Operators | None
    choices: tuple[Choice, ...]
    decode_choices: tuple[Choice, ...]
    segments: Operators | None = None

    def rows(self) -> list[tuple[str, str, str, str]]:
        """As dispatch.explain_rows; an operator whose phases differ has a row for each."""
        return phase_rows(self.choices, self.decode_choices)


def phase_rows(
    choices: Sequence[Choice], decode_choices: Sequence[Choice]
) -> list[tuple[str, str, str, str]]:
    """As dispatch.explain_rows; an operator whose phases differ has a row for each."""
    rows = []
    decoding = {row[0]: row for row in explain_rows(decode_choices)}
    for one in explain_rows(choices):
        other = decoding.get(one[0])
        if one == other:
            rows.append(one)
            continue
        rows.append((f"{one[0]}, {PREFILL}", *one[1:]))
        if other is not None:  # an unpacked context is prefill's alone
            rows.append((f"{other[0]}, {DECODE}", *other[1:]))
    return rows


def operators_for(plan: StepPlan, usual: Operators, decode: Operators | None) -> Operators:
    """The operators for an eager step with this plan."""
    return usual if decode is None or plan.graph_key is None else decode


def bind_phases(
    config: EngineConfig,
    need: OpNeed,
    providers: Sequence[Provider],
    has_graphs: bool,
    has_fp8: bool = True,
) -> BoundOperators:
    """Bind all phases. ``has_graphs``: decode shall be captured, where its operators may be.

    ``has_fp8``: whether weights are multiplied in FP8; a flag that names who does is refused else.
    """
    if not has_fp8:
        _refuse_fp8_backends(config, providers)
    usual, choices = _bind(config, replace(need, phase=PREFILL), providers)
    is_wished = has_graphs and config.max_captured_prefill_tokens != 0
    segments = usual if is_wished and _can_capture_segments(config, need, choices) else None
    decode_need = replace(need, phase=DECODE)
    if has_graphs:
        try:
            decode, decode_choices = _bind(config, replace(decode_need, is_graph=True), providers)
        except UnsupportedError as error:
            logger.warning("decode runs without CUDA graphs: %s", error)
        else:
            own = None if decode.kernels == usual.kernels else decode
            return BoundOperators(usual, own, decode, choices, decode_choices, segments)
    decode, decode_choices = _bind(config, decode_need, providers)
    own = None if decode.kernels == usual.kernels else decode
    return BoundOperators(usual, own, None, choices, decode_choices, segments)


def _refuse_fp8_backends(config: EngineConfig, providers: Sequence[Provider]) -> None:
    """ConfigError for a flag that would force nothing, as no operator of its group runs."""
    for flag, (_, group) in BACKENDS.items():
        name = getattr(config, flag)
        named = [provider for provider in providers if provider.name == name]
        served = {op for op in group for provider in named if _has_kernel(provider, op)}
        if not served or not served <= OF_FP8_WEIGHTS:
            continue
        left = [op for op in group if op not in OF_FP8_WEIGHTS]
        able = sorted({p.name for p in providers for op in left if _has_kernel(p, op)})
        others = f"choose one of {', '.join(able)}, or " if able else ""
        raise ConfigError(
            f"{flag} is {name!r}: it multiplies FP8 weights, and those of this run are not (the "
            f"model has none, or they are dequantised: see weights); {others}leave {flag} out"
        )


def _has_kernel(provider: Provider, op: str) -> bool:
    return op in OPERATORS and provider.supports(op, OpNeed()).has_kernel


def _can_capture_segments(config: EngineConfig, need: OpNeed, choices: Sequence[Choice]) -> bool:
    """Whether what runs between two attentions can be captured; UnsupportedError if it has to."""
    need = replace(need, phase=PREFILL, is_graph=True)
    for choice in choices:
        verdict = choice.provider.supports(choice.op, need)
        if choice.op in IN_SEGMENTS and not verdict.is_ok:
            why = f"{choice.op} by {choice.provider.name} {verdict.reason}"
            if config.max_captured_prefill_tokens:
                raise UnsupportedError(
                    f"max_captured_prefill_tokens is {config.max_captured_prefill_tokens}, but "
                    f"{why}. Leave it out, or leave the choice of providers to auto."
                )
            logger.warning("prefill runs without CUDA graphs: %s", why)
            return False
    return True


def _bind(
    config: EngineConfig, need: OpNeed, providers: Sequence[Provider]
) -> tuple[Operators, tuple[Choice, ...]]:
    forced: dict[str, str] = {}
    if config.attention_provider != "auto":
        forced = dict.fromkeys(OPERATORS, config.attention_provider)
    flags = []
    for flag, (phases, group) in BACKENDS.items():
        name = getattr(config, flag)
        if name != "auto" and need.phase in phases:
            forced.update(dict.fromkeys(_served(flag, name, group, providers), name))
            flags.append(f"{flag} {name}")
    try:
        return _by_rows(need, providers, forced, *bind_operators(need, providers, forced, fastest))
    except UnsupportedError as error:
        if not flags:
            raise
        raise UnsupportedError(f"{error} (given: {', '.join(flags)})") from error


def _by_rows(
    need: OpNeed,
    providers: Sequence[Provider],
    forced: Mapping[str, str],
    ops: Operators,
    choices: Sequence[Choice],
) -> tuple[Operators, tuple[Choice, ...]]:
    """The same with kernels by rows where other providers are fastest for few and for many."""
    kernels, names, taken = dict(ops.kernels), dict(ops.providers), {c.op: c for c in choices}
    for op in OPERATORS_BY_ROWS:
        found = None
        if op not in forced:
            found = choose_by_rows(op, need, providers, fastest, row_classes(op, need))
        if found is not None:
            whole = taken.get(op)
            unpacked = None if whole is None else whole.unpacked
            taken[op], kernels[op] = replace(found[0], unpacked=unpacked), found[1]
            names[op] = "by rows"
    split = {op for op in OPERATORS_BY_ROWS if names.get(op) == "by rows"}
    fusions = {name: run for name, run in ops.fusions.items() if split.isdisjoint(FUSIONS[name])}
    bound = Operators(kernels, names, fusions, ops.unpacked, ops.products)
    return bound, tuple(taken.values())


def _served(flag: str, name: str, group: Sequence[str], providers: Sequence[Provider]) -> list[str]:
    """The operators of a group that the provider ``name`` has kernels for, at least one."""

    provider = next((one for one in providers if one.name == name), None)
    served = [] if provider is None else [op for op in group if _has_kernel(provider, op)]
    if not served:
        able = sorted({one.name for one in providers for op in group if _has_kernel(one, op)})
        what = "there is no such provider" if provider is None else "it has none of these kernels"
        raise ConfigError(
            f"{flag} is {name!r}: {what}. For {', '.join(group)} there are: {', '.join(able)}; "
            f"or leave {flag} out"
        )
    return served
