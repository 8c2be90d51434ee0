"""Selections that are wrong on purpose, as taps: what an evaluation has to notice.

The lists stay valid in form (ascending, in the row's sight, as long as before), so that nothing
but the answers can tell.
"""

from __future__ import annotations

import torch

from gnomon.attention.indices import KeySet, ListSegment
from gnomon.attention.ops.values import Selection
from gnomon.evaluate.answering_rows import AnsweringRows


class RandomLists(AnsweringRows):
    """Each row attends as many keys as its indexer chose, but drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._dice = torch.Generator().manual_seed(seed)

    def index(self, layer: int, selection: Selection) -> KeySet:
        keys = selection.keys
        (segment,) = keys.segments
        assert isinstance(segment, ListSegment)
        num_seen = keys.axis.kv_len.long()
        longest = max(int(num_seen.max()), segment.width)
        chance = torch.rand(keys.axis.num_rows, longest, generator=self._dice)
        chance[torch.arange(longest) >= num_seen[:, None]] = -1.0
        drawn = chance.topk(segment.width).indices
        drawn[torch.arange(segment.width) >= segment.count[:, None]] = longest  # behind all others
        ids = drawn.sort(-1).values
        ids[ids == longest] = -1
        lists = ListSegment(segment.part, segment.space, ids.to(segment.ids.dtype), segment.count)
        broken = KeySet(keys.axis, (lists,))
        return super().index(layer, Selection(broken, selection.margin, selection.nan_rows))
