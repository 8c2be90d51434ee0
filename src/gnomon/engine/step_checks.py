"""Checked mode in the engine: its level, the poison in free pages, and what faults become.

In:  the flag and the environment variable GNOMON_CHECK; pages as they change hands; a batch that
     has run, its hidden states, the checker.
Out: the level and where it is from; NaN in every page that nobody may read; a Verdict on the step:
     flags that stay on the device, and a reason for each request that must fail once they landed.
Not here: the rules (gnomon.attention.checks), failing requests (core.py).
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.attention.checked import CheckLevel, StepChecker, Violation
from gnomon.cache.tensors import CacheTensors
from gnomon.errors import ConfigError

logger = logging.getLogger(__name__)

VARIABLE = "GNOMON_CHECK"
NAN_SCORES = "an index score of this request was NaN: its weights or its cache hold NaN"


def check_level(flag: str | None, environment: Mapping[str, str]) -> tuple[CheckLevel, str]:
    """(level, source): the flag if given, else the environment variable, else off."""
    if flag is not None:
        return CheckLevel(flag), "flag"
    given = environment.get(VARIABLE, "")
    if not given:
        return CheckLevel.OFF, "default"
    levels = [str(level) for level in CheckLevel]
    if given not in levels:
        near = difflib.get_close_matches(given, levels, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{VARIABLE} is {given!r}: allowed are {', '.join(levels)}.{hint}")
    return CheckLevel(given), "environment"


class PagePoison:
    """Fills pages with NaN when they become free, and again when they are taken."""

    def __init__(self, cache: CacheTensors) -> None:
        self._cache = cache

    def changes_hands(self, group: str, pages: Sequence[int]) -> None:
        """These pages of a group hold nothing that anybody may read."""
        self._cache.poison(group, pages)


def is_device_error(error: BaseException) -> bool:
    """Whether the device is lost with it (illegal access, failed assertion): nothing runs on it.

    Torch says so by the error's class. Triton and other libraries raise plain RuntimeErrors for
    theirs, so that the device is asked: one that is lost answers with its error ever after.
    """
    if isinstance(error, torch.AcceleratorError):
        return True
    is_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types
    if not isinstance(error, RuntimeError) or not is_started:
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def row_flags(hidden: Tensor, nan_rows: Tensor) -> Tensor:
    """On the device, bool [2, R]: rows of hidden [R, D] not finite; rows whose scores held NaN."""
    if hidden.is_cuda:
        from gnomon.engine.step_checks_triton import row_flags as in_one_launch

        return in_one_launch(hidden, nan_rows)
    largest = torch.linalg.vector_norm(hidden, ord=torch.inf, dim=-1)
    return torch.stack((~largest.isfinite(), nan_rows))


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What a step showed of its rows; `faults` says it of its requests.

    flags: by row_flags(), on the device. rows: request and position of each of its R rows, -1 and
    0 where there is none. violations: rules of checked mode that were broken.
    """

    flags: Tensor
    rows: tuple[NDArray[np.int64], NDArray[np.int64]]
    request_ids: Sequence[str]
    violations: tuple[Violation, ...] = ()

    def faults(self, flags: NDArray[np.bool_] | None = None) -> dict[str, str]:
        """Request id -> why it must fail. ``flags``: landed before; else they are waited for."""
        is_bad, has_nan = self.flags.cpu().numpy() if flags is None else flags
        found: dict[str, str] = {}
        if is_bad.any() or has_nan.any():
            request, position = self.rows
            for row in (is_bad & (request >= 0)).nonzero()[0][::-1].tolist():
                found[self.request_ids[request[row]]] = (
                    f"the hidden state at position {position[row]} of this request is not finite: "
                    "its weights or its cache hold NaN or infinity"
                )
            for row in (has_nan & (request >= 0)).nonzero()[0].tolist():
                found[self.request_ids[request[row]]] = NAN_SCORES
        for violation in self.violations:
            if violation.request is not None:
                found[violation.request] = str(violation)
        return found


def broken_rules(checker: StepChecker | None) -> tuple[Violation, ...]:
    """What checked mode found in the step that has run; each is logged."""
    found = () if checker is None else checker.violations()
    for violation in found:
        logger.error("checked mode: %s", violation)
    return found
