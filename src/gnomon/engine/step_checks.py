"""Checked mode in the engine: its level, the poison in free pages, and what faults become.

In:  the flag and the environment variable GNOMON_CHECK; pages as they change hands; a batch that
     has run, its hidden states, the checker.
Out: the level and where it is from; NaN in every page that nobody may read; a reason for each
     request that must fail.
Not here: the rules (gnomon.attention.checks), failing requests (core.py).
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence

import torch

from gnomon.attention.checked import CheckLevel, StepChecker
from gnomon.attention.geometry import RowTensor
from gnomon.cache.tensors import CacheTensors
from gnomon.engine.batch import Batch
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


def request_faults(
    batch: Batch, hidden: RowTensor, nan_rows: RowTensor, checker: StepChecker | None
) -> dict[str, str]:
    """Request id -> why it must fail: NaN scores, hidden states not finite, broken rules.

    ``hidden`` [R, D] and ``nan_rows`` [R] of the whole step. One look at the device if all is well.
    """
    largest = torch.linalg.vector_norm(hidden.data, ord=torch.inf, dim=-1)
    is_bad = ~largest.isfinite()
    faults: dict[str, str] = {}
    if bool((is_bad | nan_rows.data).any()):
        request, position = hidden.axis.host_rows()
        for row in (is_bad.cpu().numpy() & (request >= 0)).nonzero()[0][::-1].tolist():
            faults[batch.request_ids[request[row]]] = (
                f"the hidden state at position {position[row]} of this request is not finite: its "
                "weights or its cache hold NaN or infinity"
            )
        for row in (nan_rows.data.cpu().numpy() & (request >= 0)).nonzero()[0].tolist():
            faults[batch.request_ids[request[row]]] = NAN_SCORES
    for violation in () if checker is None else checker.violations():
        logger.error("checked mode: %s", violation)
        if violation.request is not None:
            faults[violation.request] = str(violation)
    return faults
