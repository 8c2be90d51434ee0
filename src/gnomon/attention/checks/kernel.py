"""CheckedKernel: one kernel between its rules; called like the kernel, it returns what it returns.

In:  a kernel, its operator and provider, the inspector. Out: the kernel's results.
While the inspector is not active a call costs one look at it. In a thorough check arguments are
passed with NaN in their padding rows and torch's uninitialised memory holds NaN; where the contract
leaves a padding row's result open it is then 0. Live rows are never changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.checks.contract import Outputs
from gnomon.attention.checks.effort import pick_rows
from gnomon.attention.checks.faults import Fault, Rule, always, bad_rows
from gnomon.attention.checks.inspector import Inspector
from gnomon.attention.checks.memory import (
    ArgumentGuard,
    GuardedOutputs,
    poison_rows,
    poisoned_scratch,
    quieten,
)
from gnomon.attention.checks.pool_watch import PoolWatch
from gnomon.attention.checks.results import argument_faults, broken_rows, silent_faults, unpack
from gnomon.attention.checks.rules import RULES, CallRules, pool_of
from gnomon.attention.ops.values import TopK
from gnomon.attention.spec import SPECS
from gnomon.attention.spec.model import Arguments

Kernel = Callable[..., Any]


def takes_out(kernel: Kernel) -> bool:
    """Whether a kernel takes its results preallocated, by a keyword ``out``."""
    try:
        return "out" in inspect.signature(kernel).parameters
    except (TypeError, ValueError):  # built-in functions that do not tell
        return False


class CheckedKernel:
    """See the module docstring."""

    def __init__(self, op: str, kernel: Kernel, provider: str, inspector: Inspector) -> None:
        self.op = op
        self._kernel = kernel
        self._provider = provider
        self._inspector = inspector
        self._rules: CallRules = RULES[op]
        self._names = tuple(argument.name for argument in SPECS[op].arguments)
        self._takes_out = takes_out(kernel)

    def __call__(self, *given: Any) -> Any:
        """Check the arguments, run, check the results."""
        inspector = self._inspector
        if not inspector.is_active:
            return self._kernel(*given)
        arguments = given if len(given) == len(self._names) else (*given, False)  # want_margin
        inspector.begin_call(self.op)
        self._report(self._rules.before(arguments))
        silent = self._silent(arguments)
        faults, sound = argument_faults(arguments, self._rules.rowwise, self._names, silent)
        self._report(faults)
        if self._rules.keywise:
            self._report(self._key_faults(arguments))
        run = _Run(self._kernel, self._rules, arguments, silent)
        results, unwritten = self._run(run)
        ignored = silent if sound is None else ~sound if silent is None else silent | ~sound
        healthy = self._check_values(run, results, ignored, unwritten)
        self._report(self._rules.after(arguments, results))
        self._recheck(arguments, results, healthy)
        if inspector.is_thorough:
            results = quieten(results, run.outputs, silent)
        return _packed(self.op, run.outputs, results)

    def _silent(self, arguments: Arguments) -> Tensor | None:
        first = arguments[0]
        num_rows = int(first.shape[0]) if isinstance(first, Tensor) else -1
        return self._rules.silent(arguments, self._inspector.rows.live(num_rows))

    def _key_faults(self, arguments: Arguments) -> Iterable[Fault]:
        """Faults of arguments on the axis of the tokens written."""
        written = pool_of(arguments, self._rules)
        if written is None:
            return []
        faults, _ = argument_faults(arguments, self._rules.keywise, self._names, written[1] < 0)
        return [replace(fault, is_of_writes=True) for fault in faults]

    def _run(self, run: _Run) -> tuple[dict[str, Tensor], Tensor | None]:
        """(results, rows of given memory that were left as they were)."""
        is_thorough, written = self._inspector.is_thorough, pool_of(run.arguments, self._rules)
        passed = run.poisoned() if is_thorough else run.arguments
        guard = ArgumentGuard(passed, self._names) if is_thorough else None
        watch = None if written is None else PoolWatch(*written, is_thorough)
        buffers = None
        if self._takes_out and run.outputs:
            buffers = GuardedOutputs(run.outputs, _device(run.arguments))
        with poisoned_scratch() if is_thorough else nullcontext():
            result = run.call(passed, buffers)
        if watch is not None:
            self._report(watch.faults())
        if guard is not None:
            self._report(guard.faults())
        if buffers is not None:
            self._report(buffers.faults())
            return buffers.results(), buffers.unwritten()
        results, faults = unpack(run.outputs, result)
        self._report(faults)
        return results, None

    def _check_values(
        self,
        run: _Run,
        results: dict[str, Tensor],
        ignored: Tensor | None,
        unwritten: Tensor | None,
    ) -> Tensor | None:
        """Report rows that are not finite or not quiet; bool [R] of the rows that may be redone."""
        broken = broken_rows(run.outputs, results, ignored)
        if broken is not None:
            self._report(self._blame(run, broken, unwritten))
        self._report(silent_faults(run.outputs, results, run.silent))
        if ignored is None and broken is None:
            return None
        if broken is None:
            assert ignored is not None
            return ~ignored
        return ~broken if ignored is None else ~(broken | ignored)

    def _blame(self, run: _Run, broken: Tensor, unwritten: Tensor | None) -> Iterable[Fault]:
        """Why live rows are not finite: not written, or a leak of padding, or just so."""
        if unwritten is not None:
            left = bad_rows(broken & unwritten)
            if left:
                yield Fault(Rule.WRITTEN, left, always("the row of out= is as it was"))
            broken = broken & ~unwritten
        rows = bad_rows(broken)
        if not rows:
            return
        rule, text = Rule.FINITE, "NaN or infinity, though the row's own arguments are finite"
        if self._inspector.is_thorough and run.has_poison():
            with poisoned_scratch():
                again, _ = unpack(run.outputs, run.call(run.arguments, None))
            still = broken_rows(run.outputs, again, None)
            if still is None or not bool((still & broken).any()):
                rule, text = Rule.LEAK, "NaN, but finite when padding rows hold no NaN"
            else:
                text += "; a row that is not written, or a bad entry of the cache, shows like this"
        yield Fault(rule, rows, always(text))

    def _recheck(
        self, arguments: Arguments, results: dict[str, Tensor], healthy: Tensor | None
    ) -> None:
        """Recompute a few rows."""
        inspector = self._inspector
        if not inspector.recomputes(self._rules.turn):
            return
        candidates: Tensor | int = healthy if healthy is not None else _num_rows(results, arguments)
        rows = pick_rows(candidates, inspector.effort.rows, inspector.num_checks)
        if rows or self._rules.keywise:
            self._report(self._rules.recheck(arguments, results, rows, inspector.effort))

    def _report(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self._inspector.report(self.op, self._provider, fault)


class _Run:
    """One call: what is passed, and how."""

    def __init__(
        self, kernel: Kernel, rules: CallRules, arguments: Arguments, silent: Tensor | None
    ) -> None:
        self.arguments = arguments
        self.silent = silent
        self.outputs: Outputs = rules.outputs(arguments)
        self._kernel = kernel
        self._rules = rules

    def poisoned(self) -> Arguments:
        """The arguments with NaN in all rows that take part in nothing."""
        passed = poison_rows(self.arguments, self._rules.rowwise, self.silent)
        written = pool_of(self.arguments, self._rules)
        if written is not None:
            passed = poison_rows(passed, self._rules.keywise, written[1] < 0)
        return passed

    def has_poison(self) -> bool:
        """Whether a thorough check passes other arguments than it was given."""
        return self.poisoned() is not self.arguments

    def call(self, passed: Arguments, buffers: GuardedOutputs | None) -> Any:
        """Run the kernel."""
        if buffers is None:
            return self._kernel(*passed)
        return self._kernel(*passed, out=buffers.passed)


def _device(arguments: Arguments) -> torch.device:
    for value in arguments:
        if isinstance(value, Tensor):
            return value.device
    raise TypeError("a call without a tensor")  # every operator has one


def _num_rows(results: dict[str, Tensor], arguments: Arguments) -> int:
    for value in (*results.values(), *arguments):
        if isinstance(value, Tensor) and value.dim():
            return int(value.shape[0])
    return 0


def _packed(op: str, outputs: Outputs, results: dict[str, Tensor]) -> Any:
    """Results in the form in which the operator returns them."""
    if op == "topk":
        parts = results["ids"], results["count"], results.get("margin"), results["nan_rows"]
        return TopK(*parts)
    if not outputs:
        return None
    values = tuple(results[output.name] for output in outputs)
    return values[0] if len(values) == 1 else values
