"""Rotary tables of a model and the rotations of one step.

In:  a ModelConfig, the number of positions to cover; per step, the row axis and the write axis.
Out: a RopeTable [positions, D_r / 2], and `Rotations`: looked up once a step, used by every layer.
Maths: oracle_math.md §1.3 (two conventions: the attention is interleaved in both families, the
indexer's follows the family) and §1.4 (YaRN by parts; cos and sin times its attention factor).
Not here: the rotation itself (operator ``rope``), the softmax scale (ModelConfig).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis, take_axis
from gnomon.attention.ops.fusions import rope_rows
from gnomon.attention.ops.values import RopeRows, RopeTable
from gnomon.attention.step import AttentionStep
from gnomon.models.config import ModelConfig, YarnConfig


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> Tensor:
    """[dim / 2] float32: angle per position of each pair of columns, stretched by YaRN if given."""
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn is None:
        return plain
    length = yarn.original_max_position_embeddings

    def turning_dimension(num_turns: float) -> float:
        """The pair that makes ``num_turns`` full turns over the original context."""
        return dim * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning_dimension(yarn.beta_fast), turning_dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    stretched_share = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / yarn.factor * stretched_share + plain * (1 - stretched_share)


def rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> RopeTable:
    """Cosines and sines of positions 0 .. num_positions − 1, float32 [num_positions, D_r / 2]."""
    yarn = config.rope.yarn
    frequencies = inverse_frequencies(config.qk_rope_head_dim, config.rope.theta, yarn)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    factor = 1.0 if yarn is None else yarn.attention_factor
    return RopeTable((angles.cos() * factor).to(device), (angles.sin() * factor).to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Rotations:
    """The rotations of one step's rows, and of the rows whose keys it writes."""

    query: RopeRows  # attention queries, on the row axis
    key: RopeRows  # shared rope keys, on the write axis
    index_query: RopeRows  # on the axis of the SPARSE rows, of no rows where there are none
    index_key: RopeRows  # on the write axis

    @classmethod
    def of_step(cls, table: RopeTable, step: AttentionStep, config: ModelConfig) -> Rotations:
        """Look the rotations up; equal axes and conventions share one value."""
        rows, written = step.geometry.rows, step.geometry.writes["tokens"].axis
        sparse, interleaved = step.plan.sparse, config.indexer_rope_interleave
        scored = _no_rows(rows) if sparse is None else sparse.axis
        looked_up: dict[tuple[int, bool], RopeRows] = {}

        def at(axis: RowAxis, is_interleaved: bool) -> RopeRows:
            key = (id(axis), is_interleaved)
            if key not in looked_up:
                looked_up[key] = rope_rows(step.ops, table, axis, is_interleaved)
            return looked_up[key]

        return cls(
            at(rows, True), at(written, True), at(scored, interleaved), at(written, interleaved)
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All that was looked up, each once, always in the same order."""
        looked_up: dict[int, Tensor] = {}
        for rows in (self.query, self.key, self.index_query, self.index_key):
            for held in (rows.cos, rows.sin, rows.turn):
                if held is not None:
                    looked_up[id(held)] = held
        return tuple(looked_up.values())


def _no_rows(rows: RowAxis) -> RowAxis:
    return take_axis(rows, np.empty(0, dtype=np.int64), f"{rows.label} > no sparse rows")
