"""Rules that hold for the results of all operators: shapes, dtypes, finite numbers, silent rows.

In:  what a kernel returned and what its contract promises. Out: results by name, and faults.
Not here: rules of single operators (rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.checks.contract import Output, Outputs
from gnomon.attention.checks.faults import Fault, Faults, Rule, always, fault_where, per_row
from gnomon.attention.spec.model import Arguments


def unpack(outputs: Outputs, result: Any) -> tuple[dict[str, Tensor], list[Fault]]:
    """(results by name, faults of their form). With a fault the results are not to be used."""
    if not outputs:
        return {}, []
    if len(outputs) == 1 and isinstance(result, Tensor):
        found: dict[str, Any] = {outputs[0].name: result}
    elif isinstance(result, tuple) and len(result) == len(outputs):
        found = {o.name: value for o, value in zip(outputs, result, strict=True)}
    else:
        found = {o.name: getattr(result, o.name, None) for o in outputs}
    faults = [fault for o in outputs for fault in _form_faults(o, found[o.name])]
    return found, faults


def _form_faults(output: Output, value: Any) -> Faults:
    wanted = f"{output.dtype} {list(output.shape)}"
    if not isinstance(value, Tensor):
        text = f"{output.name} is {type(value).__name__}, a tensor {wanted} is needed"
        yield Fault(Rule.SHAPE, (), always(text), is_contained=False)
        return
    if value.dtype == output.dtype and tuple(value.shape) == output.shape:
        return
    rows: tuple[int, ...] = ()
    if value.dim() and output.shape and value.shape[0] != output.shape[0]:
        rows = (min(int(value.shape[0]), output.shape[0]),)  # the first one too many, or lacking
    text = f"{output.name} is {value.dtype} {list(value.shape)}, {wanted} is needed"
    yield Fault(Rule.SHAPE, rows, always(text), is_contained=False)


def argument_faults(
    arguments: Arguments, places: tuple[int, ...], names: tuple[str, ...], silent: Tensor | None
) -> tuple[list[Fault], Tensor | None]:
    """(faults, rows whose arguments are finite: bool [R], None for all) of row-wise arguments."""
    sound: Tensor | None = None
    faults: list[Fault] = []
    for place in places:
        if bool(arguments[place].isfinite().all()):
            continue
        is_bad = per_row(~arguments[place].isfinite())
        if silent is not None:
            is_bad = is_bad & ~silent
        text = f"argument {names[place]!r} holds NaN or infinity before the call"
        for fault in fault_where(is_bad, Rule.FINITE_ARGUMENTS, always(text)):
            faults.append(fault)
            sound = ~is_bad if sound is None else sound & ~is_bad
    return faults, sound


def broken_rows(
    outputs: Outputs, results: Mapping[str, Tensor], ignored: Tensor | None
) -> Tensor | None:
    """Rows with a number that is not finite where one is due: bool [R]; None if there are none."""
    broken: Tensor | None = None
    for output in outputs:
        value = results[output.name]
        if not output.is_finite or not value.is_floating_point():
            continue
        if bool(value.isfinite().all()):
            continue
        is_bad = per_row(~value.isfinite())
        if ignored is not None:
            is_bad = is_bad & ~ignored
        if bool(is_bad.any()):
            broken = is_bad if broken is None else broken | is_bad
    return broken


def silent_faults(outputs: Outputs, results: Mapping[str, Tensor], silent: Tensor | None) -> Faults:
    """Silent rows that hold anything but what the contract says."""
    if silent is None or not bool(silent.any()):
        return
    for output in outputs:
        if output.quiet is None:
            continue
        value = results[output.name]
        is_bad = per_row(value != output.quiet) & silent
        yield from fault_where(is_bad, Rule.SILENT, _silent_detail(output, value))


def _silent_detail(output: Output, value: Tensor) -> Any:
    def detail(row: int) -> str:
        numbers = value[row].flatten()
        wrong = numbers[numbers != output.quiet]
        first = wrong[0].item() if wrong.numel() else torch.nan
        return f"{output.name} holds {first}, {output.quiet} is due"

    return detail
