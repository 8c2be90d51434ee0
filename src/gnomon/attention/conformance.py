"""Conformance of kernels: run the OpSpecs against any callable with an operator's signature.

In:  an operator's name and a callable, ours or anybody's; a seed, a dtype, sizes, a cache layout.
Out: ConformanceReport: a line for each case, a table for people, an exception for test suites.

    from gnomon.attention.conformance import check_operator
    report = check_operator("sparse_mla", my_kernel, seed=1)
    print(report)
    report.raise_if_failed()

`describe_operator("sparse_mla")` says what is passed and what is due. Every case compares with the
reference in float64 and, beside it, sets traps: arguments may not be written, uninitialised memory
holds NaN, and a kernel with a keyword ``out`` gets its results preallocated between redzones.
What a kernel raises is a failed case, not an error. Not here: the specs (spec/), speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.checks.contract import Output
from gnomon.attention.checks.kernel import takes_out
from gnomon.attention.checks.memory import ArgumentGuard, GuardedOutputs, poisoned_scratch
from gnomon.attention.checks.rules import RULES
from gnomon.attention.dispatch import KernelSet
from gnomon.attention.layouts import IndexKeyDims, LatentDims, choose_layout
from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.routes import AttentionDims
from gnomon.attention.spec import SPECS, Case, OpSpec, Scale, SpecResult, check_provider
from gnomon.errors import ConfigError, NumericsError

__all__ = ["CaseReport", "ConformanceReport", "check_operator", "describe_operator"]

READERS = {"sparse_mla": 2, "index_scores_paged": 2, "context_gather": 0}  # place of the pool
PACKED_DIMS = AttentionDims(
    num_heads=4,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_topk=12,
    index_num_heads=16,
    index_head_dim=128,
)
Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class CaseReport:
    """One case: whether it held, the worst difference, its share of what is allowed, and where.

    ``problem``: empty if it held; else what was raised, which trap was touched, or how far off.
    """

    label: str
    is_ok: bool
    worst: float
    share: float
    where: str
    problem: str


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """All cases of one operator and one kernel. ``print(report)`` shows the table."""

    op: str
    kernel: str
    dtype: torch.dtype
    cases: tuple[CaseReport, ...]

    @property
    def is_ok(self) -> bool:
        """Whether every case held, and there was one."""
        return bool(self.cases) and all(case.is_ok for case in self.cases)

    @property
    def failures(self) -> tuple[CaseReport, ...]:
        """The cases that did not hold."""
        return tuple(case for case in self.cases if not case.is_ok)

    def raise_if_failed(self) -> None:
        """NumericsError that lists the failed cases, if there are any."""
        if not self.is_ok:
            lines = [f"  {case.label}: {case.problem}" for case in self.failures]
            raise NumericsError("\n".join([self._verdict(), *(lines or ["  no case was run"])]))

    def table(self) -> str:
        """A line a case, worst differences in units of what the tolerance allows, a verdict."""
        rows = [("case", "", "worst", "of allowed", "where")]
        for case in self.cases:
            place = case.where if case.is_ok else case.problem
            mark = "ok" if case.is_ok else "FAILED"
            rows.append((case.label, mark, f"{case.worst:.2g}", f"{case.share:.0%}", place))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self._verdict()])

    def __str__(self) -> str:
        return self.table()

    def _verdict(self) -> str:
        held = len(self.cases) - len(self.failures)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} by {self.kernel}, {dtype}: {held} of {len(self.cases)} cases hold"


def check_operator(
    op: str,
    kernel: Kernel,
    cases: Iterable[Case] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: Scale | None = None,
    layout: str | None = None,
) -> ConformanceReport:
    """Run ``kernel`` on all cases of ``op``, or on ``cases``.

    ``dtype``: of the float arguments, and which tolerance holds. ``scale``: sizes to draw at.
    ``layout``: for operators that read a cache, the layout of its pool ("fp8_ds_mla_656", then with
    a latent of 512 and 64 columns unless ``scale`` says else); plain numbers if not given.
    Raises ConfigError for an operator, dtype or layout that does not exist.
    """
    spec = _spec(op, dtype)
    if scale is None:
        scale = Scale() if layout is None else replace(Scale(), dims=PACKED_DIMS, page_size=16)
    drawn = cases
    if drawn is None:
        drawn = spec.cases(torch.Generator().manual_seed(seed), dtype, scale)
    found = None if layout is None else _layout(op, layout, scale, dtype)
    reports = [
        _check(spec, kernel, case if found is None else _packed(case, op, found), dtype)
        for case in drawn
    ]
    return ConformanceReport(op, name_of(kernel), dtype, tuple(reports))


def describe_operator(op: str) -> str:
    """The contract of an operator in words: arguments in order, results, rules, tolerances."""
    spec = _spec(op, torch.float32)
    case = next(iter(spec.cases(torch.Generator().manual_seed(0), torch.float32, Scale())))
    lines = [
        f"{op}({', '.join(argument.name for argument in spec.arguments)})",
        f"  {spec.summary}",
    ]
    lines += ["arguments"]
    lines += [f"  {a.name:<14} {a.axes:<22} {a.dtype}".rstrip() for a in spec.arguments]
    lines += ["results, with the shapes of the typical case"]
    outputs = RULES[op].outputs(case.arguments)
    lines += [f"  {_described(output)}" for output in outputs] or ["  none: the pool is written"]
    lines += ["rules", *(f"  {rule}" for rule in spec.constraints), "tolerances"]
    for dtype, allowed in spec.tolerances.items():
        limit = f"{allowed.absolute:.2g} + {allowed.relative:.2g} of the value"
        lines.append(f"  {str(dtype).removeprefix('torch.'):<9} {limit}: {allowed.reason}")
    return "\n".join(lines)


def name_of(kernel: Kernel) -> str:
    """What to call a callable in reports."""
    return str(getattr(kernel, "__qualname__", type(kernel).__qualname__))


def _described(output: Output) -> str:
    dtype = str(output.dtype).removeprefix("torch.")
    quiet = "" if output.quiet is None else f", {output.quiet:g} where nothing is due"
    return f"{output.name:<14} {list(output.shape)!s:<22} {dtype}{quiet}"


def _spec(op: str, dtype: torch.dtype) -> OpSpec:
    if op not in SPECS:
        raise ConfigError(f"no operator is called {op!r}; there are: {', '.join(sorted(SPECS))}")
    if dtype not in SPECS[op].tolerances:
        known = ", ".join(str(one).removeprefix("torch.") for one in SPECS[op].tolerances)
        raise ConfigError(f"{op} is not specified in {dtype}; use one of {known}")
    return SPECS[op]


def _check(spec: OpSpec, kernel: Kernel, case: Case, dtype: torch.dtype) -> CaseReport:
    traps: list[str] = []
    trapped = KernelSet("kernel", 0, {spec.name: _trapped(spec, kernel, traps)})
    try:
        result = check_provider(spec, trapped, case, dtype)
    except Exception as error:  # whatever a foreign kernel raises is its failure
        text = f"raised {type(error).__name__}: {error}"
        return CaseReport(case.label, False, math.inf, math.inf, "nowhere", text)
    problem = "; ".join([*traps, *([] if result.is_ok else [_difference(result)])])
    place = result.where
    return CaseReport(case.label, not problem, result.worst, result.share, place, problem)


def _difference(result: SpecResult) -> str:
    if math.isinf(result.worst):
        return f"{result.where}: wrong shape, NaN or infinity"
    return f"{result.where} is off by {result.worst:.3g}, {result.share:.3g} times what is allowed"


def _trapped(spec: OpSpec, kernel: Kernel, traps: list[str]) -> Kernel:
    """The kernel between traps; what they catch is appended to ``traps``."""
    rules, names = RULES[spec.name], tuple(argument.name for argument in spec.arguments)
    has_out = takes_out(kernel)

    def run(*arguments: Any) -> Any:
        guard = ArgumentGuard(arguments, names)
        buffers = None
        if has_out and (outputs := rules.outputs(arguments)):
            buffers = GuardedOutputs(outputs, torch.device("cpu"))
        with poisoned_scratch():
            result = (
                kernel(*arguments) if buffers is None else kernel(*arguments, out=buffers.passed)
            )
        for fault in guard.faults():
            traps.append(fault.detail(0))
        if buffers is None:
            return result
        traps.extend(fault.detail(0) for fault in buffers.faults())
        left = buffers.unwritten().nonzero()[:, 0].tolist()
        if left:
            traps.append(f"row {left[0]} of out= was not written")
        values = tuple(buffers.results().values())
        return values[0] if len(values) == 1 else values

    return run


def _layout(op: str, name: str, scale: Scale, dtype: torch.dtype) -> KVLayout:
    if op not in READERS:
        raise ConfigError(
            f"{op} reads no cache, so layout={name!r} says nothing; operators that do are: "
            f"{', '.join(READERS)}"
        )
    dims = scale.dims
    latents = LatentDims(dims.kv_lora_rank, dims.qk_rope_head_dim)
    is_index = op == "index_scores_paged"
    return choose_layout(name, IndexKeyDims(dims.index_head_dim) if is_index else latents, dtype)


def _packed(case: Case, op: str, layout: KVLayout) -> Case:
    """The case with its pool written in another layout; both sides read the same bytes."""
    place = READERS[op]
    plain: PagedPool = case.arguments[place]
    pool = layout.allocate(plain.num_pages, plain.page_size)
    every = torch.arange(plain.num_slots)
    values: Tensor = plain.layout.gather(plain, every)
    layout.write(pool, every, values)
    arguments = (*case.arguments[:place], pool, *case.arguments[place + 1 :])
    return Case(case.label, arguments)
