"""The reference provider: the definition of truth. Slow, float64 inside, no other provider's code.

In:  the operators' arguments in any float dtype. Out: results rounded once to the query's dtype, so
that float64 arguments give float64 truth.
"""

from __future__ import annotations

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.providers.reference.attention import dense_mha, lse_merge, sparse_mla
from gnomon.attention.providers.reference.cache import (
    context_gather,
    index_prepare,
    latent_write,
)
from gnomon.attention.providers.reference.index import index_scores, index_scores_paged, topk
from gnomon.attention.providers.reference.linear import (
    linear_fp8,
    moe_fp8,
    quantise_rows,
    silu_quantise,
)
from gnomon.attention.providers.reference.moe import moe
from gnomon.attention.providers.reference.norms import layer_norm, rms_norm, rope

__all__ = [
    "PROVIDER",
    "context_gather",
    "dense_mha",
    "index_prepare",
    "index_scores",
    "index_scores_paged",
    "latent_write",
    "layer_norm",
    "linear_fp8",
    "lse_merge",
    "moe",
    "moe_fp8",
    "quantise_rows",
    "rms_norm",
    "rope",
    "silu_quantise",
    "sparse_mla",
    "topk",
]

PROVIDER = KernelSet(
    name="reference",
    rank=100,
    kernels={
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "rope": rope,
        "latent_write": latent_write,
        "index_prepare": index_prepare,
        "index_scores": index_scores,
        "index_scores_paged": index_scores_paged,
        "topk": topk,
        "sparse_mla": sparse_mla,
        "dense_mha": dense_mha,
        "context_gather": context_gather,
        "lse_merge": lse_merge,
        "moe": moe,
        "quantise_rows": quantise_rows,
        "silu_quantise": silu_quantise,
        "linear_fp8": linear_fp8,
        "moe_fp8": moe_fp8,
    },
)
