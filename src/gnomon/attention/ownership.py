"""Which rank holds a key: decode context parallelism stripes a request's positions over ranks.

In:  positions or lengths, as ints or integer tensors of any shape.
Out: ranks, counts and local positions, by one formula that all ranks share.
Not here: which rank computes a row (sharding.py), the merge of partial outputs (ops).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gnomon.errors import GeometryError

__all__ = ["KeyOwnership"]

Ints = TypeVar("Ints", int, Tensor)


@dataclass(frozen=True, slots=True)
class KeyOwnership:
    """Position p belongs to rank p // interleave % size. ``interleave``: tokens in a row, >= 1."""

    rank: int
    size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or self.interleave < 1:
            raise GeometryError(
                f"key ownership: rank {self.rank} of {self.size}, interleave {self.interleave}; "
                "0 <= rank < size and interleave >= 1 are needed"
            )

    def owner(self, position: Ints) -> Ints:
        """The rank that holds ``position``."""
        return position // self.interleave % self.size

    def num_owned(self, kv_len: Ints) -> Ints:
        """How many of positions 0 .. kv_len-1 this rank holds."""
        period = self.interleave * self.size
        whole = kv_len // period * self.interleave
        rest = kv_len % period - self.rank * self.interleave
        if isinstance(rest, Tensor):
            return whole + torch.clamp(rest, 0, self.interleave)
        return whole + min(max(rest, 0), self.interleave)

    def local_position(self, position: Ints) -> Ints:
        """The place of an owned ``position`` among its owner's keys (any owner)."""
        period = self.interleave * self.size
        return position // period * self.interleave + position % self.interleave

    def global_position(self, local: Ints) -> Ints:
        """The position of this rank's ``local``-th key; the inverse of ``local_position``."""
        period = self.interleave * self.size
        block = local // self.interleave
        return block * period + self.rank * self.interleave + local % self.interleave
