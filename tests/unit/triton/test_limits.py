"""What the triton provider cannot do is a requirement, known before weights are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnomon.attention.dispatch import OpNeed
from gnomon.attention.providers.triton import PROVIDER, topk
from gnomon.attention.routes import AttentionDims
from gnomon.errors import UnsupportedError

NEED = OpNeed(
    next(iter(PROVIDER.requirement.devices or ())),
    torch.bfloat16,
    AttentionDims(24, 512, 128, 64, 128, topk.MOST, 64, 128),
)


@pytest.mark.parametrize("k", [1, 512, 1000, 2048, topk.MOST])
def test_lists_up_to_the_widest_are_kept(k: int) -> None:
    assert NEED.dims is not None
    assert PROVIDER.supports("topk", replace(NEED, dims=replace(NEED.dims, index_topk=k))).is_ok


def test_a_list_too_wide_is_refused_by_the_requirement_not_by_the_first_step() -> None:
    assert NEED.dims is not None
    wide = replace(NEED, dims=replace(NEED.dims, index_topk=topk.MOST + 1))
    verdict = PROVIDER.supports("topk", wide)
    assert not verdict.is_ok
    assert verdict.reason == f"needs index_topk of 1..{topk.MOST}, not {topk.MOST + 1}"
    assert PROVIDER.supports("sparse_mla", wide).is_ok
    with pytest.raises(UnsupportedError):
        topk.topk(torch.zeros(1, 8), torch.ones(1, dtype=torch.int32), topk.MOST + 1)
