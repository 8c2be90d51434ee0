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
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, slots=True)
class Note:
    """One call that will compile something. ``module``: `python -m module` builds lists of jobs.

    ``job``: plain values.
    """

    module: str
    job: Mapping[str, Any]


class DryRun(TorchFunctionMode):
    """The mode (module docstring).

    It sees calls from Python alone, so that results pass through unchanged: operators of other
    libraries return tensors that are none, which torch could not take back from a dispatch mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; clear what it leaves undefined."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in UNDEFINED and isinstance(result, Tensor):
            result.zero_()
        return result


def dry_run_here() -> DryRun | None:
    """The dry run that this call is part of, if it is."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # the same
    return next((mode for mode in modes if isinstance(mode, DryRun)), None)
