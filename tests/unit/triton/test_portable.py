"""FP8 products of shapes that a library lacks: never by plain torch on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnomon.attention.providers.external import deepgemm, deepgemm_moe, portable
from gnomon.attention.providers.torch import linear as plain
from gnomon.attention.providers.triton import linear, moe

DTYPE = torch.bfloat16


def named(calls: list[str], name: str) -> Any:
    def run(*_: Any) -> str:
        calls.append(name)
        return name

    return run


@pytest.mark.parametrize(("is_cuda", "expected"), [(True, "triton"), (False, "torch")])
def test_odd_shapes_go_to_triton_on_a_gpu(
    is_cuda: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of 65 rows and experts 100 wide are none of DeepGEMM's."""
    calls: list[str] = []
    for module, name in ((linear, "triton"), (plain, "torch")):
        monkeypatch.setattr(module, "linear_fp8", named(calls, name))
    for module, name in ((moe, "triton"), (plain, "torch")):
        monkeypatch.setattr(module, "moe_fp8", named(calls, name))
    library: Any = SimpleNamespace()  # has no function to call
    x, weight = (SimpleNamespace(shape=shape, is_cuda=is_cuda) for shape in ((4, 128), (65, 128)))
    adapter = deepgemm.DeepGemm(library, 132)
    assert adapter.linear_fp8(x, None, weight, None, DTYPE) == expected  # type: ignore[arg-type]
    experts: Any = SimpleNamespace(shape=(3, 200, 128)), None
    rows: Any = x, None
    ids: Any = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
    assert deepgemm_moe.moe_fp8(library, rows, ids, experts, experts, False, DTYPE) == expected
    assert calls == [expected, expected]
    assert portable.linear_fp8(x, None, weight, None, DTYPE) == expected  # type: ignore[arg-type]
