"""The triton provider: portable GPU kernels, which also run under Triton's interpreter on a CPU.

In:  the operators' arguments in fp32, bf16 or fp16, on CUDA (on a CPU where TRITON_INTERPRET=1).
Out: results in the query's dtype. Every kernel can be captured: none reads a value back to the host
     and no shape hangs on one.
Importing this package imports triton; `providers.builtin_providers` does so only where it can run.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.attention.dispatch import KernelSet, Requirement, Sizes
from gnomon.attention.providers import TRITON_RANK
from gnomon.attention.providers.triton import (
    attention,
    cache,
    fixed,
    heads,
    index,
    linear,
    moe,
    narrow,
    prepare,
    rope_rows,
    route,
    rows,
    rows_quantise,
    topk,
    workspace,
)
from gnomon.attention.providers.triton.language import DEVICES, DTYPES

KEPT = Sizes.of("index_topk", range(1, topk.MOST + 1))
REQUIREMENT = Requirement(devices=DEVICES, dtypes=DTYPES, can_capture=True, fixed_dtypes=DTYPES)
PROVIDER = KernelSet(
    name="triton",
    rank=TRITON_RANK,
    kernels={
        **attention.KERNELS,
        **cache.KERNELS,
        **index.KERNELS,
        **linear.KERNELS,
        **moe.KERNELS,
        **rows.KERNELS,
        **topk.KERNELS,
    },
    requirement=REQUIREMENT,
    special={"topk": replace(REQUIREMENT, sizes=(KEPT,))},
    fixed={
        **attention.FIXED,
        **fixed.FIXED,
        **index.FIXED,
        **index.FIXED_FUSIONS,
        **linear.FIXED,
        **moe.FIXED,
    },
    variants={**index.VARIANTS},
    fusions={
        **heads.FUSIONS,
        **index.FUSIONS,
        **linear.FUSIONS,
        **moe.FUSIONS,
        **narrow.FUSIONS,
        **prepare.FUSIONS,
        **rope_rows.FUSIONS,
        **route.FUSIONS,
        **rows.FUSIONS,
        **rows_quantise.FUSIONS,
        **topk.FUSIONS,
        **workspace.FUSIONS,
    },
    by_batch=frozenset({*heads.FUSIONS, *narrow.FUSIONS}),
)
