"""The package `deep_gemm`: where it is, what is called of it, which operators a build can serve.

In:  places (places.py).
Out: `find`: the package. `usable`: of the adapter's kernels, those whose functions the build has;
     an operator that is missing is refused with that reason (provider.py).
Found as `deep_gemm`, inside vLLM, or in --provider-path (a folder, or deep_gemm-*.tar.xz).
Not here: the calls (deepgemm.py, deepgemm_moe.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from gnomon.attention.providers.external.deepgemm_moe import GroupedProducts
from gnomon.attention.providers.external.places import Places, cuda_home, lacks, missing
from gnomon.attention.providers.external.provider import Kernel
from gnomon.errors import UnsupportedError

URL = "https://github.com/deepseek-ai/DeepGEMM"
PACKAGE = "deep_gemm"
Codes = tuple[Tensor, Tensor]
_FLAT = ("fp8_mqa_logits",)
_PAGED = ("get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits")
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "index_scores": _FLAT,
    "lazy_scores": _FLAT,
    "index_scores_paged": _PAGED,
    "lazy_scores_paged": _PAGED,
    "linear_fp8": ("fp8_gemm_nt",),
    "moe_fp8": ("m_grouped_fp8_gemm_nt_contiguous",),
}
"""By operator and fusion, what of the package it calls."""


class DeepGemmLibrary(GroupedProducts, Protocol):
    """The functions of the package `deep_gemm` that are called here."""

    def fp8_mqa_logits(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        first_key: Tensor,
        stop_key: Tensor,
        *,
        clean_logits: bool,
    ) -> Tensor:
        """[M, N] of q [M, H, D], kv ([N, D], [N]), weights [M, H]; −inf outside a row's keys."""

    def get_paged_mqa_logits_metadata(
        self, context_lens: Tensor, block_kv: int, num_sms: int
    ) -> Tensor:
        """The division of the work over SMs; runs on the device."""

    def fp8_paged_mqa_logits(self, *arguments: Any, clean_logits: bool) -> Tensor:
        """Scores [B · next_n, most] of q [B, next_n, H, D] over pages [pages, 64, 1, D + 4]."""

    def fp8_gemm_nt(self, a: Codes, b: Codes, d: Tensor, *, disable_ue8m0_cast: bool) -> None:
        """Into d [M, N]: a ([M, K], [M, K / 128]) · b ([N, K], [N / 128, K / 128])ᵀ."""


def usable(kernels: Mapping[str, Kernel], library: Any) -> Mapping[str, Kernel]:
    """Those kernels whose functions this build has."""
    return {name: run for name, run in kernels.items() if not lacks(library, FUNCTIONS[name])}


def find(places: Places) -> Any:
    """The package; UnsupportedError if it is nowhere, cannot be used here or serves no operator."""
    if not places.has_module(PACKAGE):
        raise missing(PACKAGE, URL, "deep_gemm or deep_gemm-*.tar.xz")
    if cuda_home() is None:
        raise UnsupportedError(
            "compiles its kernels with nvcc, and none is here: install a CUDA toolkit (12.3 or "
            "later) and set CUDA_HOME"
        )
    module = places.module(PACKAGE)
    every = sorted({name for names in FUNCTIONS.values() for name in names})
    if len(lacks(module, every)) == len(every):
        raise UnsupportedError(
            f"deep_gemm {getattr(module, '__version__', '')} has none of {', '.join(every)}: 2.1 "
            "or later is needed"
        )
    return module
