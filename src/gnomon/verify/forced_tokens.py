"""A sampler whose tokens are given: those of another run, where there are any.

In:  tokens (prompt and output) by request name; then what a sampler is given.
Out: PendingSamples whose tokens are the given ones; a position without one keeps what was sampled.
A token is a discrete choice like a key list: where arithmetic rounds, two runs choose otherwise at
close logits, and then nothing behind it can be compared. So the second run gets the first one's.
Not here: whether the choice was right (rough_comparison.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gnomon.engine.sampler import PendingSample, Sampler, SampleRow

Tokens = Mapping[str, tuple[int, ...]]


class ForcedSampler(Sampler):
    """Samples, then puts the given tokens in the place of the sampled ones."""

    def __init__(self, engine_seed: int) -> None:
        super().__init__(engine_seed)
        self.given: Tokens = {}

    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> PendingSample:
        """As a sampler; `given` has the last word."""
        pending = super().launch(logits, rows)
        known = [
            (place, tokens[row.position])
            for place, row in enumerate(rows)
            if row.position < len(tokens := self.given.get(row.request.request_id, ()))
        ]
        if not known:
            return pending
        places, ids = (torch.from_numpy(np.array(part)) for part in zip(*known, strict=True))
        forced = pending.token_ids.clone()
        forced[places.to(forced.device)] = ids.to(forced)
        return replace(pending, token_ids=forced)
