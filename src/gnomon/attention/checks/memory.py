"""Traps in memory around one call: poisoned rows and scratch, redzones, guarded arguments.

In:  the arguments of a call and the results that it should give.
Out: what to pass instead, and faults afterwards if a trap was touched. A result that a kernel
writes into given memory is filled with bytes 0xFF before (NaN in every float dtype) and lies
between redzones of bytes 0x7F. Not here: traps in the cache's pools (pool_watch.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.checks.contract import Output, Outputs
from gnomon.attention.checks.faults import Detail, Fault, Faults, Rule, always
from gnomon.attention.spec.model import Arguments

REDZONE_ROWS = 2
REDZONE_BYTE = 0x7F
POISON_BYTE = 0xFF
GUARDED_NUMBERS = 1 << 22  # larger arguments are weights, which a kernel has no business with


class GuardedOutputs:
    """Preallocated results between redzones, for a kernel with a keyword ``out``."""

    def __init__(self, outputs: Outputs, device: torch.device) -> None:
        self._outputs = outputs
        self._whole = [_between_redzones(output, device) for output in outputs]
        self._rows = [
            whole.narrow(0, REDZONE_ROWS, output.shape[0])
            for whole, output in zip(self._whole, outputs, strict=True)
        ]

    @property
    def passed(self) -> Tensor | tuple[Tensor, ...]:
        """What the kernel gets as ``out``."""
        return self._rows[0] if len(self._rows) == 1 else tuple(self._rows)

    def results(self) -> dict[str, Tensor]:
        """The rows, whoever wrote them."""
        return {o.name: rows for o, rows in zip(self._outputs, self._rows, strict=True)}

    def unwritten(self) -> Tensor:
        """Rows of any result that still hold nothing but poison: bool [R]."""
        masks = [
            (_bytes(rows) == POISON_BYTE).flatten(1).all(1)
            for rows in self._rows
            if rows[0:1].numel()
        ]
        if not masks:
            return torch.zeros(self._rows[0].shape[0], dtype=torch.bool)
        return torch.stack(masks).any(0)

    def faults(self) -> Faults:
        """Redzones that were written."""
        for output, whole in zip(self._outputs, self._whole, strict=True):
            num_rows = output.shape[0]
            changed = (_bytes(whole) != REDZONE_BYTE).flatten(1).any(1)
            changed[REDZONE_ROWS : REDZONE_ROWS + num_rows] = False
            for place in changed.nonzero()[:, 0].tolist():
                row = place - REDZONE_ROWS
                yield Fault(Rule.REDZONE, (row,), _redzone_detail(output, row), is_contained=False)


def _redzone_detail(output: Output, row: int) -> Detail:
    side = "before its first" if row < 0 else "behind its last"
    text = f"{output.name} was written {side} row; it has rows 0 .. {output.shape[0] - 1}"
    return always(text)


def _between_redzones(output: Output, device: torch.device) -> Tensor:
    num_rows, *rest = output.shape
    whole = torch.zeros((num_rows + 2 * REDZONE_ROWS, *rest), dtype=output.dtype, device=device)
    _bytes(whole).fill_(REDZONE_BYTE)
    _bytes(whole.narrow(0, REDZONE_ROWS, num_rows)).fill_(POISON_BYTE)
    return whole


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor [R, ...], as uint8 [R, n]."""
    flat = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


class ArgumentGuard:
    """Notices when a call changes tensors that it was only given to read."""

    def __init__(self, arguments: Arguments, names: tuple[str, ...]) -> None:
        self._kept = [
            (name, value, value.clone())
            for name, value in zip(names, arguments, strict=True)
            if isinstance(value, Tensor) and value.numel() <= GUARDED_NUMBERS
        ]

    def faults(self) -> Faults:
        """Arguments that differ from what they were."""
        for name, value, before in self._kept:
            same = (value == before) | ((value != value) & (before != before))
            if bool(same.all()):
                continue
            rows = (~same).reshape(same.shape[0], -1).any(1) if same.dim() else ~same[None]
            where = tuple(rows.nonzero()[:, 0].tolist())
            text = f"argument {name!r} was changed by the call"
            yield Fault(Rule.READ_ONLY, where, always(text), is_contained=False)


def poison_rows(arguments: Arguments, places: tuple[int, ...], silent: Tensor | None) -> Arguments:
    """The arguments with NaN in the silent rows of those at ``places``; copies, never in place."""
    if silent is None or not bool(silent.any()):
        return arguments
    passed = list(arguments)
    for place in places:
        value = passed[place]
        if value.shape[0] == silent.shape[0] and value.is_floating_point():
            mask = silent.view(-1, *(1,) * (value.dim() - 1))
            passed[place] = value.masked_fill(mask, torch.nan)
    return tuple(passed)


@contextmanager
def poisoned_scratch() -> Iterator[None]:
    """Within it, memory that torch hands out uninitialised holds NaN, or the largest integer."""
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*determinis.*")
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def quieten(results: Mapping[str, Tensor], outputs: Outputs, silent: Tensor | None) -> Any:
    """Results with 0 in silent rows where the contract leaves them open (their NaN ends here)."""
    if silent is None:
        return dict(results)
    quiet = dict(results)
    for output in outputs:
        value = quiet[output.name]
        if output.quiet is None and output.is_finite and value.shape[0] == silent.shape[0]:
            mask = silent.view(-1, *(1,) * (value.dim() - 1))
            quiet[output.name] = value.masked_fill(mask, 0)
    return quiet
