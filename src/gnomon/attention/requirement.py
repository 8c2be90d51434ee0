"""What a run asks of kernels, and what a kernel asks of its surroundings, both as data.

In:  device, dtype, dims, layouts, phase, page size and GPU of a run (OpNeed); what a kernel was
     built for (Requirement).
Out: a Verdict whose reason names the first thing that does not fit.
Not here: providers and the choice among them (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from gnomon.attention.routes import AttentionDims


@dataclass(frozen=True, slots=True)
class OpNeed:
    """What a run asks of every operator. Layout ids are those of the pools ("bf16_576").

    ``is_deterministic``: a row's bits hang on its own data alone, whatever rows run beside it.
    ``phase``: "decode" (every request has a row or few), "prefill" (all other steps) or None, any.
    ``num_rows``: of a call, where kernels are chosen by it. ``num_experts``: that a rank holds.
    ``capability``: compute capability of the GPU, (9, 0) for Hopper. None: not known, no matter.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    dims: AttentionDims | None = None
    latent_layout: str | None = None
    index_layout: str | None = None
    is_graph: bool = False
    is_deterministic: bool = False
    phase: str | None = None
    page_size: int | None = None
    capability: tuple[int, int] | None = None
    num_rows: int | None = None
    num_experts: int | None = None

    def words(self) -> str:
        """What a message says of it; sizes are said where they are at fault."""
        phase = "" if self.phase is None else f"{self.phase} steps "
        rest = [layout for layout in (self.latent_layout, self.index_layout) if layout]
        rest += ["in a captured graph"] if self.is_graph else []
        rest += ["with fixed bits"] if self.is_deterministic else []
        return ", ".join((f"{phase}on {self.device} in {self.dtype}", *rest))

    def size(self, name: str) -> int | None:
        """A field of ``dims``, "qk_head_dim" (of un-absorbed keys) or "page_size", if known."""
        if name == "page_size" or self.dims is None:
            return self.page_size if name == "page_size" else None
        if name == "qk_head_dim":
            return self.dims.qk_nope_head_dim + self.dims.qk_rope_head_dim
        value: int = getattr(self.dims, name)
        return value

    def layout_of(self, op: str) -> str | None:
        """The layout whose bytes, or whose rounded values, this operator is given, if any."""
        if op in ("latent_write", "sparse_mla", "context_gather"):
            return self.latent_layout
        if op in ("index_prepare", "index_scores", "index_scores_paged"):
            return self.index_layout
        return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a provider can do an operator under a need, and why not.

    ``has_kernel``: False where the operator is none of the provider's business at all.
    """

    is_ok: bool
    reason: str
    has_kernel: bool = True


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that must be among those a kernel was built for. ``names``: see OpNeed.size."""

    names: tuple[str, ...]
    allowed: frozenset[tuple[int, ...]]

    @classmethod
    def of(cls, name: str, values: Iterable[int]) -> Sizes:
        """One size and what it may be."""
        return cls((name,), frozenset((value,) for value in values))

    def fault(self, need: OpNeed) -> str | None:
        """What does not fit; None where it does or where the need does not say."""
        held = tuple(need.size(name) for name in self.names)
        if None in held or held in self.allowed:
            return None
        return f"needs {_words(self.names)} of {_ranges(self.allowed)}, not {_words(held)}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a kernel asks of its surroundings, as data. None means: anything.

    ``fixed_dtypes``: where it can keep a row's bits apart from the other rows (is_deterministic).
    ``capabilities``: major compute capabilities of GPUs. ``sizes``: all have to fit.
    """

    devices: frozenset[str] | None = None
    capabilities: frozenset[int] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    layouts: frozenset[str] | None = None
    can_capture: bool = False
    fixed_dtypes: frozenset[torch.dtype] = frozenset()
    sizes: tuple[Sizes, ...] = ()
    phases: frozenset[str] | None = None

    def check(self, op: str, need: OpNeed) -> Verdict:
        """Compare with a need; the reason names the first thing that does not fit."""
        layout = need.layout_of(op)
        if self.devices is not None and need.device not in self.devices:
            return Verdict(False, f"runs on {_names(self.devices)}, not on {need.device}")
        if (fault := self._place_fault(need)) is not None:
            return Verdict(False, fault)
        if self.dtypes is not None and need.dtype not in self.dtypes:
            return Verdict(False, f"computes in {_names(self.dtypes)}, not in {need.dtype}")
        if self.layouts is not None and layout is not None and layout not in self.layouts:
            return Verdict(False, f"reads layouts {_names(self.layouts)}, not {layout}")
        for sizes in self.sizes:
            if (fault := sizes.fault(need)) is not None:
                return Verdict(False, fault)
        if need.is_graph and not self.can_capture:
            return Verdict(False, "cannot run inside a captured graph")
        if need.is_deterministic and need.dtype not in self.fixed_dtypes:
            return Verdict(False, f"has row bits that hang on the batch in {need.dtype}")
        return Verdict(True, "meets every requirement")

    def _place_fault(self, need: OpNeed) -> str | None:
        """Why the GPU or the phase does not fit, if it does not."""
        if self.capabilities is not None and need.capability is not None:
            major, minor = need.capability
            if major not in self.capabilities:
                built = ", ".join(f"sm_{one}x" for one in sorted(self.capabilities))
                return f"is built for {built}, this GPU is sm_{major}{minor}"
        if self.phases is not None and need.phase is not None and need.phase not in self.phases:
            return f"is for {_names(self.phases)} steps, not for {need.phase}"
        return None


def _words(values: Sequence[object]) -> str:
    return str(values[0]) if len(values) == 1 else f"({', '.join(map(str, values))})"


def _ranges(allowed: frozenset[tuple[int, ...]]) -> str:
    """Allowed sizes in words; a long run of single ones as first..last."""
    ordered = sorted(allowed)
    first, last = ordered[0], ordered[-1]
    if len(first) == 1 and len(ordered) > 3 and last[0] - first[0] == len(ordered) - 1:
        return f"{first[0]}..{last[0]}"
    return " or ".join(_words(one) for one in ordered)


def _names(values: frozenset[str] | frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(value) for value in values))
