"""Deterministic runs on a GPU: every operator goes to kernels of fixed bits, whatever is faster.

`auto` then ignores the batch size; a library that is forced is refused, with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gnomon.attention.by_rows import ByRows
from gnomon.attention.dispatch import OPERATORS, KernelSet, OpNeed, Requirement
from gnomon.attention.routes import AttentionDims
from gnomon.engine.config import EngineConfig
from gnomon.engine.operators import BoundOperators, bind_phases
from gnomon.errors import UnsupportedError

DIMS = AttentionDims(
    num_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_topk=2048,
    index_num_heads=64,
    index_head_dim=128,
)
HALF = frozenset({torch.bfloat16})
NEED = OpNeed(
    device="cuda",
    dtype=torch.bfloat16,
    dims=DIMS,
    latent_layout="fp8_ds_mla_656",
    index_layout="index_k_132",
    page_size=64,
    capability=(9, 0),
)


def kernels(name: str, *ops: str) -> dict[str, Any]:
    return {op: f"{name}.{op}".format for op in ops}


TRITON = KernelSet(
    "triton",
    20,
    kernels("triton", *OPERATORS),
    Requirement(can_capture=True, fixed_dtypes=HALF),
    fixed=kernels("fixed", "linear", "multiply_heads", "linear_fp8", "sparse_mla"),
)
FASTER = (
    KernelSet("flashmla", 15, kernels("flashmla", "sparse_mla"), Requirement(can_capture=True)),
    KernelSet("deepgemm", 15, kernels("deepgemm", "linear_fp8"), Requirement(can_capture=True)),
)


def bound(is_deterministic: bool, **flags: Any) -> BoundOperators:
    config = EngineConfig.of(deterministic=is_deterministic, **flags)
    need = replace(NEED, is_deterministic=is_deterministic)
    return bind_phases(config, need, (TRITON, *FASTER), True)


def kinds(found: BoundOperators) -> set[str]:
    """Who serves, in any phase; "by rows" where it hangs on the batch."""
    held = [ops for ops in (found.usual, found.decode, found.graph) if ops is not None]
    return {name for ops in held for name in ops.providers.values()}


def test_auto_ignores_the_number_of_rows() -> None:
    assert "by rows" in kinds(bound(False))  # as the measurements say; the control
    found = bound(True)
    assert kinds(found) == {"triton"}
    for ops in (found.usual, found.decode or found.usual, found.graph):
        assert ops is not None
        assert not any(isinstance(kernel, ByRows) for kernel in ops.kernels.values())
        assert ops.kernels["sparse_mla"] is TRITON.fixed["sparse_mla"]
        assert ops.products.is_fixed


@pytest.mark.parametrize(
    "flag", [{"decode_backend": "flashmla"}, {"linear_backend": "deepgemm"}], ids=str
)
def test_a_forced_library_is_refused_with_the_reason(flag: dict[str, str]) -> None:
    bound(False, **flag)
    with pytest.raises(UnsupportedError, match=r"row bits that hang on the batch.*triton"):
        bound(True, **flag)
