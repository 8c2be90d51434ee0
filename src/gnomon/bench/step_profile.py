"""Which kernels a call runs on the device, how often and for how long; and one layer of them.

In:  a callable. Out: KernelTimes, the dearest first; a LayerTime where layers can be told apart.
A kernel's class is read from its name (CLASSES); a product between the sorting of pairs and the
sum of their shares, which may be the next norm's work, is the experts'. Layers begin at the write
of the latents, one kernel a layer, and the mean of those from the second write to the last is one
layer: the rest of one, the beginning of the next. The first is left out: it may have no experts.
Not here: what is called (step.py), the display (step_report.py). CUDA only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

EXPERTS, OTHER = "experts", "rows and copies"
CLASSES = (
    ("attention", r"flash_fwd|flash::|sparse_attn_fwd|attend_|combine|fmha|FlashAttn|merge_parts"),
    ("index scores", r"mqa_logits<|scores_kernel|multiply_scores"),
    ("top-k", r"topk"),
    ("experts' rest", r"sort_few|_chunks|write_pairs|add_shares|route"),
    ("FP8 linears", r"^multiply$|fp8_gemm|add_splits|multiply_fixed|add_parts"),
    ("other products", r"nvjet|gemm|cublas|narrow|heads"),
)
"""Class, and what the names of its kernels hold; the first that fits. All else: OTHER."""
PAIRS_SORTED, PAIRS_SUMMED = re.compile("sort_few|write_pairs"), re.compile("add_shares|norm")
IN_EXPERTS = re.compile("multiply|gemm|add_splits")
LAYER = re.compile("prepare_attention|latent_write|write_latent")
LEAST_MARKS = 3


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All runs of one kernel within a call: how many, microseconds in sum."""

    name: str
    count: int
    total_us: float


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer, the mean of several: microseconds and kernels by class, and from end to end."""

    classes: dict[str, float]
    counts: dict[str, float]
    span_us: float
    num_layers: int


@dataclass(frozen=True, slots=True)
class CallProfile:
    """What a call ran."""

    kernels: tuple[KernelTime, ...] = ()
    layer: LayerTime | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a kernel: microseconds from some beginning."""

    name: str
    start: float
    end: float


def profile_call(call: Callable[[], object], device: torch.device) -> CallProfile:
    """Kernels, copies and fills of one call."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as watched:
        call()
        torch.cuda.synchronize(device)
    runs = [
        Run(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in watched.events()
        if event.device_type.name == "CUDA"
    ]
    return summed(sorted(runs, key=lambda run: run.start))


def summed(runs: Sequence[Run]) -> CallProfile:
    """Runs in order of their start, by kernel and by layer."""
    counts: dict[str, int] = {}
    totals: dict[str, float] = {}
    for run in runs:
        counts[run.name] = counts.get(run.name, 0) + 1
        totals[run.name] = totals.get(run.name, 0.0) + run.end - run.start
    ordered = sorted(totals, key=lambda name: -totals[name])
    kernels = tuple(KernelTime(name, counts[name], totals[name]) for name in ordered)
    return CallProfile(kernels, _layer_of(runs))


def _layer_of(runs: Sequence[Run]) -> LayerTime | None:
    marks = [place for place, run in enumerate(runs) if LAYER.search(run.name)][1:]
    if len(marks) < LEAST_MARKS - 1:
        return None
    number = len(marks) - 1
    classes: dict[str, float] = {}
    counts: dict[str, float] = {}
    for first, last in pairwise(marks):
        for run, kind in zip(runs[first:last], classes_of(runs[first:last]), strict=True):
            classes[kind] = classes.get(kind, 0.0) + (run.end - run.start) / number
            counts[kind] = counts.get(kind, 0.0) + 1 / number
    return LayerTime(
        classes, counts, (runs[marks[-1]].start - runs[marks[0]].start) / number, number
    )


def classes_of(runs: Sequence[Run]) -> list[str]:
    """The class of each run of a layer."""
    found, is_in_experts = [], False
    for run in runs:
        is_in_experts = is_in_experts or PAIRS_SORTED.search(run.name) is not None
        if PAIRS_SUMMED.search(run.name):
            is_in_experts = False
        if (is_in_experts and IN_EXPERTS.search(run.name)) or "m_grouped" in run.name:
            found.append(EXPERTS)
        else:
            fits = (kind for kind, words in CLASSES if re.search(words, run.name))
            found.append(next(fits, OTHER))
    return found
