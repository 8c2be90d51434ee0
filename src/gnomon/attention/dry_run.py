"""A dry run: kernels are prepared and not run, fresh memory is zeros, what is to be built is noted.

In:  work, run within a DryRun. Out: `notes`: what libraries that compile for themselves were asked
     for, for others to build ahead.
What was not computed is zeros, not what the memory held before: torch's own kernels and those of
some libraries do run, and zeros are valid ids, slots and counts to them.
Not here: Triton's kernels, who builds what was noted (engine/compile_ahead.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, slots=True)
class Note:
    """One call that will compile something. ``module``: `python -m module` builds lists of jobs.

    ``job``: plain values.
    """

    module: str
    job: Mapping[str, Any]


class DryRun(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """The mode (module docstring)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types
        self.notes: list[Note] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; clear what it leaves undefined."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in UNDEFINED and isinstance(result, Tensor):
            result.zero_()
        return result


def dry_run_here() -> DryRun | None:
    """The dry run that this call is part of, if it is."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, DryRun)), None)
