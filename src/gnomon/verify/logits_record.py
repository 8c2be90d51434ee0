"""Logits as they were seen, by request and position.

In:  rows of logits with the names and positions that they belong to (it is a runner's LogitsTap).
Out: `of(name, n)`: logits [n, V] float32 on the host, NaN where no row was seen, and which were.
Not here: who listens (trace.py, captured.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


class LogitsRecorder:
    """A LogitsTap that keeps every row."""

    wants_every_row = True

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[list[int], Tensor]]] = {}

    def logits(self, request_ids: Sequence[str], positions: Sequence[int], logits: Tensor) -> None:
        """Keep the rows of each request; they stand together."""
        start = 0
        kept = logits.detach().float().cpu().clone()
        for name, group in groupby(request_ids):
            stop = start + len(list(group))
            rows = kept[start:stop]
            self._rows.setdefault(name, []).append((list(positions[start:stop]), rows))
            start = stop

    def of(self, name: str, num_rows: int) -> tuple[Tensor, Tensor]:
        """(logits [n, V], is_computed [n]); a row computed twice is as it was last."""
        seen = self._rows[name]
        logits = torch.full((num_rows, seen[0][1].shape[1]), torch.nan)
        is_computed = torch.zeros(num_rows, dtype=torch.bool)
        for positions, rows in seen:
            place = torch.tensor(positions)
            logits[place], is_computed[place] = rows, True
        return logits, is_computed
