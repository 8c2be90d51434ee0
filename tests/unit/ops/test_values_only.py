"""Attention without its lse, where a kernel can leave that out: the same values, by whoever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gnomon.attention.by_rows import ByRows
from gnomon.attention.indices import KeySet, causal_list
from gnomon.attention.ops.attend import SparseMlaKernel
from gnomon.attention.ops.fusions import sparse_values
from gnomon.attention.ops.operators import Operators
from gnomon.errors import GeometryError
from tests.unit.ops.build_step import SmallStep, operators, small_step

TORCH = operators("torch")
PLAIN = TORCH.kernels["sparse_mla"]
SCALE = 0.3


def never(*arguments: Any) -> Any:
    raise AssertionError("the lse was asked for")


def values(*arguments: Any) -> torch.Tensor:
    out: torch.Tensor = PLAIN(*arguments)[0]
    return out


def bound(kernel: Any) -> Operators:
    return Operators({**TORCH.kernels, "sparse_mla": kernel})


def attend(ops: Operators, step: SmallStep, keys: KeySet) -> torch.Tensor:
    queries, table = (step.q_latent, step.q_rope), step.geometry.tables["tokens"]
    found = sparse_values(ops, queries, step.latents, keys, table, SCALE)
    assert found.axis is step.q_latent.axis
    return found.data


@pytest.mark.parametrize(
    "kernel",
    [
        PLAIN,
        SparseMlaKernel(never, values),
        ByRows(((2, never), (100, SparseMlaKernel(never, values)))),
        ByRows(((100, PLAIN), (200, never))),
    ],
)
def test_values_are_those_of_the_operator(kernel: Any) -> None:
    step = small_step([1, 5, 1, 12], [20, 9, 7, 12], num_rows=24)
    keys = KeySet(step.q_latent.axis, (causal_list(step.q_latent.axis, "tokens", 20),))
    table = step.geometry.tables["tokens"]
    expected = TORCH.sparse_mla(step.q_latent, step.q_rope, step.latents, keys, table, SCALE)
    assert torch.equal(attend(bound(kernel), step, keys), expected.out.data)


def test_a_sink_needs_the_lse() -> None:
    step = small_step([1, 5], [20, 9])
    axis = step.q_latent.axis
    keys = KeySet(axis, (causal_list(axis, "tokens", 20),))
    sink = torch.zeros(step.q_latent.data.shape[1])
    keys = replace(keys, sink=sink)
    table = step.geometry.tables["tokens"]
    expected = TORCH.sparse_mla(step.q_latent, step.q_rope, step.latents, keys, table, SCALE)
    found = attend(bound(SparseMlaKernel(PLAIN, never)), step, keys)
    assert torch.equal(found, expected.out.data)


def test_keys_of_other_rows_are_refused() -> None:
    step, other = small_step([1, 5], [20, 9]), small_step([1, 5], [20, 9])
    keys = KeySet(other.q_latent.axis, (causal_list(other.q_latent.axis, "tokens", 20),))
    with pytest.raises(GeometryError):
        attend(bound(SparseMlaKernel(never, values)), step, keys)
