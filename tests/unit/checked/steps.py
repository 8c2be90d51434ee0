"""Builds checked steps for the tests of checked mode: three requests, padding, both caches filled.

In:  an operator and a kernel that takes its place. Out: a Bench that runs each operator of the
step once under a StepChecker. Requests are called "a", "b", "c"; rows 0–2 are of a, 3 of b, 4–15
of c, 16–19 are padding. The index scores of a are paged, those of c contiguous, b needs none.
Not here: what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gnomon.attention.checked import CheckedOperators, CheckLevel, StepChecker
from gnomon.attention.checks.effort import TURNS
from gnomon.attention.dispatch import OPERATORS
from gnomon.attention.geometry import RowTensor
from gnomon.attention.ops.operators import Operators
from gnomon.attention.ops.values import IndexTransform, RopeTable
from tests.unit.ops.build_step import DIMS, SmallStep, operators, small_step

NAMES = ("a", "b", "c")
NUM_ROWS, NUM_LIVE = 20, 16
HIDDEN, EXPERTS = 24, 5
TORCH = operators().kernels


def rope_table(num_positions: int = 64) -> RopeTable:
    """Any rotations: the tests compare kernels with each other, not with a model."""
    angle = torch.arange(num_positions)[:, None] / (1.0 + torch.arange(DIMS.qk_rope_head_dim // 2))
    return RopeTable(angle.cos(), angle.sin())


@dataclass
class Bench:
    """A step under a checker, with ``lies`` in the place of torch's kernels."""

    lies: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    level: CheckLevel = CheckLevel.FULL
    isolates: bool = False
    step: SmallStep = field(
        default_factory=lambda: small_step([3, 1, 12], [20, 3, 30], num_rows=NUM_ROWS)
    )

    def __post_init__(self) -> None:
        providers = dict.fromkeys(OPERATORS, "torch") | dict.fromkeys(self.lies, "liar")
        ops = Operators({**TORCH, **self.lies})
        self.checker = StepChecker(ops, providers, self.level, num_layers=1, isolates=self.isolates)
        self.ops = self.checker.begin_step(self.step.geometry, self.step.plan, NAMES)
        self.ops.begin_layer(0)
        self.random = torch.Generator().manual_seed(1)
        self.axis = self.step.geometry.rows
        self.table = self.step.geometry.tables["tokens"]

    def rows(self, *shape: int) -> RowTensor:
        return RowTensor(self.axis, torch.randn(NUM_ROWS, *shape, generator=self.random))

    def visit(self) -> None:
        """Go on to the next step in which the layer is checked."""
        self.ops = self.checker.begin_step(self.step.geometry, self.step.plan, NAMES)
        while not isinstance(self.ops, CheckedOperators):
            self.ops = self.checker.begin_step(self.step.geometry, self.step.plan, NAMES)
        self.ops.begin_layer(0)

    def run_a_round(self, op: str) -> None:
        """Call an operator in as many visits as it takes until rows of it are recomputed."""
        for _ in range(TURNS):
            self.run(op)
            self.visit()

    def run(self, op: str) -> Any:
        """Call one operator as a model would."""
        result = getattr(self, f"_{op}")()
        return result

    def _rms_norm(self) -> Any:
        return self.ops.rms_norm(self.rows(HIDDEN).data, torch.ones(HIDDEN), 1e-6)

    def _layer_norm(self) -> Any:
        weight = torch.linspace(0.5, 1.5, HIDDEN)
        return self.ops.layer_norm(self.rows(HIDDEN).data, weight, weight - 1, 1e-6)

    def _rope(self) -> Any:
        turns = rope_table().at(self.axis, True)
        return self.ops.rope(self.rows(DIMS.num_heads, DIMS.qk_rope_head_dim).data, turns)

    def _latent_write(self) -> Any:
        rank = DIMS.kv_lora_rank
        return self.ops.latent_write(
            self.rows(rank + DIMS.qk_rope_head_dim),
            torch.ones(rank),
            1e-6,
            rope_table().at(self.axis, True),
            self.step.latents,
            self.step.geometry.writes["tokens"],
        )

    def _index_prepare(self) -> Any:
        turns = rope_table().at(self.axis, False)
        dim = DIMS.index_head_dim
        return self.ops.index_prepare(
            self.rows(DIMS.index_num_heads, dim),
            self.rows(dim),
            IndexTransform(torch.ones(dim), torch.zeros(dim), has_hadamard=True),
            (turns, turns),
            self.step.index_keys,
            self.step.geometry.writes["tokens"],
        )

    def _index_select(self) -> Any:
        step = self.step
        return self.ops.index_select(
            step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan, True
        )

    def _sparse_mla(self) -> Any:
        step = self.step
        plain = operators()
        keys = plain.index_select(
            step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan
        ).keys
        return self.ops.sparse_mla(step.q_latent, step.q_rope, step.latents, keys, self.table, 0.2)

    def _dense_mha(self) -> Any:
        q, k = self.rows(4, 24).data, self.rows(4, 24).data
        visible = self.axis.position.clamp_max(7) + self.axis.is_live()
        return self.ops.dense_mha(q, k, self.rows(4, 16).data, visible.int(), 0.2)

    def _lse_merge(self) -> Any:
        parts = [(self.rows(4, 16).data, self.rows(4).data) for _ in range(2)]
        return self.ops.lse_merge(*parts)

    def _context_gather(self) -> Any:
        return self.ops.context_gather(self.step.latents, self.table, 2, 3, 29)

    def _moe(self) -> Any:
        ids = torch.stack(
            [torch.randperm(EXPERTS, generator=self.random)[:2] for _ in range(NUM_ROWS)]
        )
        ids = ids.masked_fill(~self.axis.is_live()[:, None], -1)
        gate_up = torch.randn(EXPERTS, 2 * 8, HIDDEN, generator=self.random) / 5
        down = torch.randn(EXPERTS, HIDDEN, 8, generator=self.random) / 3
        return self.ops.moe(self.rows(HIDDEN).data, ids, self.rows(2).data, gate_up, down)
