"""FP8 experts through grouped products: the sort, and the whole by the operator's spec."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.providers.external import deepgemm
from gnomon.attention.providers.external.deepgemm_moe import BLOCK, sorted_rows
from gnomon.attention.spec import SPECS, Scale, check_provider
from gnomon.attention.spec.model import Case
from tests.unit.external.fakes import DeepGemmModule

SMALL = replace(Scale(), num_rows=9)
WIDE = replace(SMALL, hidden_size=256, moe_intermediate_size=128)


def cases(scale: Scale) -> list[Case]:
    return list(SPECS["moe_fp8"].cases(torch.Generator().manual_seed(5), torch.bfloat16, scale))


@pytest.mark.parametrize("case", [*cases(SMALL), *cases(WIDE)], ids=lambda case: case.label)
def test_moe_fp8(case: Case) -> None:
    kernels = deepgemm.DeepGemm(DeepGemmModule(), 132).kernels()
    provider = KernelSet("deepgemm", 1, kernels)
    result = check_provider(SPECS["moe_fp8"], provider, case, torch.bfloat16)
    assert result.is_ok, result


@given(
    st.integers(1, 5).flatmap(
        lambda experts: st.tuples(
            st.just(experts),
            st.lists(st.lists(st.integers(-1, experts - 1), min_size=2, max_size=2), max_size=160),
        )
    )
)
def test_pairs_are_sorted_into_blocks_of_one_expert(drawn: tuple[int, list[list[int]]]) -> None:
    num_experts, ids = drawn
    rows = sorted_rows(torch.tensor(ids, dtype=torch.int64).view(-1, 2), num_experts)
    expert, source = rows.expert.tolist(), rows.source.tolist()
    assert len(expert) % BLOCK == 0
    for start in range(0, len(expert), BLOCK):
        assert len(set(expert[start : start + BLOCK])) == 1
    pairs = [(row, one) for row, chosen in enumerate(ids) for one in chosen]
    places = rows.place.tolist()
    kept = [place for place, (_, one) in zip(places, pairs, strict=True) if one >= 0]
    assert len(set(kept)) == len(kept)
    for place, (row, one) in zip(places, pairs, strict=True):
        assert source[place] == row
        assert expert[place] == one, "a pair of nobody lies where nothing is computed"
