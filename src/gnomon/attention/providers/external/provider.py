"""A provider over somebody else's library: requirements as data, the library looked up when asked.

In:  a name, the requirement of each operator, a function that loads the library and gives kernels,
     by operator, and fusions (ops/fusions.py), by name.
Out: a Provider. The library is looked up once, at the first need that meets the requirement, so
     that a machine without a GPU never touches it; why it is not there becomes a Verdict's reason.
     One that is there and cannot be used is told in the log as well: somebody wished for it.
Not here: where libraries are found (places.py), how they are called (the adapters).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from gnomon.attention.axes import RowAxis
from gnomon.attention.dispatch import OpNeed, Requirement, Verdict
from gnomon.attention.ops.fusions import FUSIONS
from gnomon.attention.providers import c_compiler
from gnomon.errors import MissingLibraryError, UnsupportedError

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]
EXTERNAL_RANK = 15  # behind kernels made for one GPU (10), before the portable ones (20)
UNVERIFIED_RANK = 90  # behind everything: taken where it is forced


class ExternalProvider:
    """``load`` raises UnsupportedError where the library is not usable (module docstring)."""

    def __init__(
        self,
        name: str,
        rank: int,
        requirements: Mapping[str, Requirement],
        load: Callable[[], Mapping[str, Kernel]],
    ) -> None:
        self.name = name
        self.rank = rank
        self.requirements = dict(requirements)
        self._load = load
        self._found: Mapping[str, Kernel] | str | None = None

    def supports(self, op: str, need: OpNeed) -> Verdict:
        """The requirement first, then whether the library is here and has this operator."""
        requirement = self.requirements.get(op)
        if requirement is None:
            return Verdict(False, f"has no kernel for {op}", has_kernel=False)
        verdict = requirement.check(op, need)
        if not verdict.is_ok:
            return verdict
        found = self._look_up()
        if isinstance(found, str):
            return Verdict(False, found)
        if op not in found:
            return Verdict(False, f"this build of the library lacks what {op} needs")
        return verdict

    def scratch_bytes(self, op: str, need: OpNeed) -> int:
        """The library allocates from torch and owns no arena."""
        return 0

    def prepare(self, axis: RowAxis) -> object | None:
        """Schedules live with the adapter, which knows when they stay valid."""
        return None

    def kernel(self, op: str, need: OpNeed | None = None) -> Kernel:
        """The adapter's function; UnsupportedError where the library is not usable."""
        found = self._look_up()
        if isinstance(found, str):
            raise UnsupportedError(f"provider {self.name!r}: {found}")
        return found[op]

    def fusion(self, name: str, need: OpNeed) -> Kernel | None:
        """What stands for several operators, if the adapter offers it and its library is here."""
        found = self._found
        return found.get(name) if isinstance(found, Mapping) and name in FUSIONS else None

    def _look_up(self) -> Mapping[str, Kernel] | str:
        if self._found is None:
            try:
                if c_compiler() is None:
                    raise UnsupportedError(
                        "its operands pass through Triton's kernels, which need a C compiler (what "
                        "CC names, gcc or clang), and none is found; install gcc"
                    )
                self._found = self._load()
            except UnsupportedError as error:
                self._found = str(error)
                if not isinstance(error, MissingLibraryError):
                    logger.warning(
                        "%s is not used: %s. Others serve its operators (gnomon explain says who)",
                        self.name,
                        error,
                    )
        return self._found
