"""The torch provider: vectorised kernels in plain torch, the default on a CPU.

In:  the operators' arguments in fp64, fp32, bf16 or fp16, on any device that torch knows.
Out: results in the query's dtype. Where the need is deterministic (fp32) a row's bits depend on its
own data alone.
"""

from __future__ import annotations

import torch

from gnomon.attention.dispatch import KernelSet, Requirement
from gnomon.attention.providers.torch.attention import dense_mha, lse_merge, sparse_mla
from gnomon.attention.providers.torch.cache import context_gather, index_prepare, latent_write
from gnomon.attention.providers.torch.index import (
    index_scores,
    index_scores_fixed,
    index_scores_paged,
    index_scores_paged_fixed,
)
from gnomon.attention.providers.torch.linear import (
    linear_fp8,
    linear_fp8_fixed,
    moe_fp8,
    quantise_rows,
    silu_quantise,
)
from gnomon.attention.providers.torch.moe import moe, moe_fixed
from gnomon.attention.providers.torch.norms import layer_norm, rms_norm, rope
from gnomon.attention.providers.torch.topk import topk

PROVIDER = KernelSet(
    name="torch",
    rank=50,
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
    requirement=Requirement(fixed_dtypes=frozenset({torch.float32})),
    fixed={
        "index_scores": index_scores_fixed,
        "index_scores_paged": index_scores_paged_fixed,
        "moe": moe_fixed,
        "linear_fp8": linear_fp8_fixed,
    },
)
