"""FP8 experts through grouped products: the sort, and the whole by the operator's spec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.providers.external import deepgemm, deepgemm_moe
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


@pytest.mark.parametrize("case", cases(WIDE), ids=lambda case: case.label)
def test_many_rows_go_by_chunks_of_one_size(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepgemm_moe, "CHUNK", 256)
    library, sizes = DeepGemmModule(), []
    run = library.m_grouped_fp8_gemm_nt_contiguous

    def noted(*arguments: Any, **options: Any) -> None:
        sizes.append(len(arguments[3]))
        run(*arguments, **options)

    monkeypatch.setattr(library, "m_grouped_fp8_gemm_nt_contiguous", noted)
    provider = KernelSet("deepgemm", 1, deepgemm.DeepGemm(library, 132).kernels())
    result = check_provider(SPECS["moe_fp8"], provider, case, torch.bfloat16)
    assert result.is_ok, result
    num_pairs, num_experts = case.arguments[1].numel(), len(case.arguments[3][0])
    most = num_pairs + num_experts * (BLOCK - 1)
    assert set(sizes) <= ({256} if most > 256 else {BLOCK, 2 * BLOCK})
    assert len(sizes) == (2 * -(-most // 256) if num_pairs else 0)


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
