"""Attention operators of the triton provider, by name; `FIXED` where the need is deterministic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gnomon.attention.providers.triton.attention_dense import dense_mha
from gnomon.attention.providers.triton.attention_merge import lse_merge
from gnomon.attention.providers.triton.attention_sparse import sparse_mla, sparse_mla_fixed

KERNELS: Mapping[str, Callable[..., Any]] = {
    "sparse_mla": sparse_mla,
    "dense_mha": dense_mha,
    "lse_merge": lse_merge,
}
FIXED: Mapping[str, Callable[..., Any]] = {"sparse_mla": sparse_mla_fixed}
