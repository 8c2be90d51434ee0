"""What Triton would compile, without compiling or running anything.

In:  code that launches kernels, within `watching()`; tensors on a CPU.
Out: a set of LaunchKeys: kernel, compile-time constants, and what Triton specialises of the other
     arguments (dtypes, alignment of pointers, integers that are 1 or multiples of 16), unless the
     kernel says not to. Two launches of one key share one compiled kernel.
Kernels do nothing: what they would have written is zeros, as in a dry run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from gnomon.attention.dry_run import DryRun

LaunchKey = tuple[str, tuple[tuple[str, Any], ...]]


@contextmanager
def watching() -> Iterator[dict[LaunchKey, int]]:
    """Launches within are counted by their key and do nothing."""
    seen: dict[LaunchKey, int] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        key = launch_key(kernel, args, options)
        seen[key] = seen.get(key, 0) + 1

    with pytest.MonkeyPatch.context() as patch, DryRun():
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(JITFunction, "run", run)
        yield seen


def launch_key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> LaunchKey:
    """The key of one launch."""
    signature = inspect.signature(kernel.fn)
    names = list(signature.parameters)
    given = dict(zip(names, args, strict=False)) | options
    rules = kernel.kwargs if isinstance(kernel, InterpretedFunction) else vars(kernel)
    plain = _named(rules, "do_not_specialize", names)
    unaligned = _named(rules, "do_not_specialize_on_alignment", names)
    parts = []
    for name, value in given.items():
        parameter = signature.parameters.get(name)
        is_constant = parameter is None or "constexpr" in str(parameter.annotation)
        shown = value if is_constant else _kind(value, name in plain, name in unaligned)
        parts.append((name, _hashable(shown)))
    return kernel.fn.__name__, tuple(sorted(parts))


def _named(rules: Any, rule: str, names: list[str]) -> set[str]:
    found = rules.get(rule) or ()
    return {names[one] if isinstance(one, int) else one for one in found}


def _kind(value: Any, is_plain: bool, is_unaligned: bool) -> Any:
    """What Triton tells apart of a runtime argument."""
    if isinstance(value, torch.Tensor):
        aligned = is_plain or is_unaligned or value.data_ptr() % 16 == 0
        return f"{value.dtype}{'' if aligned else ' unaligned'}"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        if is_plain:
            return width
        special = "=1" if value == 1 else " x16" if value % 16 == 0 and not is_unaligned else ""
        return width + special
    if isinstance(value, tuple):
        return tuple(_kind(one, is_plain, is_unaligned) for one in value)
    return type(value).__name__


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
