"""DeepGEMM: index scores in FP8, of gathered keys and of pages; FP8 linears and experts.

In:  what index_scores, index_scores_paged, linear_fp8 and moe_fp8 (deepgemm_moe.py) take (spec/).
Out: as there.
Contract of the library: kernels.md §1.4, §1.5, §1.14. Under index_k_132 queries and keys are e4m3
codes times a power of two by definition, so their codes are taken back exactly (codes.py) and the
query's scale, the softmax scale and the head weight become one fp32 weight a head.
Kernels are compiled by nvcc at first use, some five seconds each unless deepgemm_builds.py had them
built ahead, and kept in ~/.deep_gemm: a CUDA toolkit is needed (CUDA_HOME).
A cached key that holds NaN scores 0 through pages (relu drops the NaN of its codes), else NaN.
Shapes that the library lacks run in triton (portable.py). Not here: where it is found, and what of
it each operator needs (deepgemm_library.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dispatch import Requirement, Sizes
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.external import portable
from gnomon.attention.providers.external.codes import key_codes, query_codes
from gnomon.attention.providers.external.deepgemm_builds import Noting
from gnomon.attention.providers.external.deepgemm_library import DeepGemmLibrary, find, usable
from gnomon.attention.providers.external.deepgemm_moe import kernel_of
from gnomon.attention.providers.external.places import Places
from gnomon.attention.providers.external.provider import EXTERNAL_RANK, ExternalProvider, Kernel

NAME = "deepgemm"
PAGE_SIZE = 64
HEAD_DIM = 128
BLOCK_ROWS = 2048
COLUMNS, GROUP = 64, 128  # multiples of a weight's N and K

Codes = tuple[Tensor, Tensor]
"""Codes e4m3 and their scales; of queries, scales that hold the head weights too."""

_INDEX_SIZES = (
    Sizes.of("index_num_heads", (32, 64)),
    Sizes.of("index_head_dim", (HEAD_DIM,)),
)
_ON_CUDA = frozenset({"cuda"})
_ON_HOPPER = frozenset({9})
_PRODUCTS = Requirement(
    devices=_ON_CUDA,
    capabilities=_ON_HOPPER,
    dtypes=frozenset({torch.bfloat16}),
    can_capture=True,
)
REQUIREMENTS = {
    "index_scores": Requirement(
        devices=_ON_CUDA,
        capabilities=_ON_HOPPER,
        layouts=frozenset({"index_k_132"}),
        sizes=_INDEX_SIZES,
        can_capture=True,
    ),
    "index_scores_paged": Requirement(
        devices=_ON_CUDA,
        capabilities=_ON_HOPPER,
        layouts=frozenset({"index_k_132"}),
        sizes=(*_INDEX_SIZES, Sizes.of("page_size", (PAGE_SIZE,))),
        can_capture=True,
    ),
    "linear_fp8": _PRODUCTS,
    "moe_fp8": _PRODUCTS,
}


class DeepGemm:
    """Calls the library."""

    def __init__(self, library: DeepGemmLibrary, num_sms: int) -> None:
        self._library = library
        self._num_sms = num_sms

    def kernels(self) -> Mapping[str, Kernel]:
        """By operator."""
        return {
            "index_scores": self.index_scores,
            "index_scores_paged": self.index_scores_paged,
            "lazy_scores": self.lazy_scores,
            "lazy_scores_paged": self.lazy_scores_paged,
            "linear_fp8": self.linear_fp8,
            "moe_fp8": kernel_of(self._library),
        }

    def index_scores(
        self, q: Tensor, weights: Tensor, keys: Tensor, count: Tensor, scale: float
    ) -> Tensor:
        """Scores [M, N] of q [M, Hi, Di], keys [N, Di]; −inf from count[m] on."""
        num_rows, num_keys = q.shape[0], keys.shape[0]
        if num_rows == 0 or num_keys == 0:
            return q.new_full((num_rows, num_keys), -math.inf, dtype=torch.float32)
        query = query_codes(q, weights, scale)
        return self._contiguous(query, key_codes(keys), count, is_clean=True)

    def lazy_scores(
        self,
        q: Tensor,
        weights: Tensor,
        pool: PagedPool,
        pages: Tensor,
        num_keys: int,
        count: Tensor,
        scale: float,
    ) -> Tensor:
        """[M, num_keys] against a request's first entries; defined below count[m].

        Stands for context_gather and index_scores: the codes are read as they lie in the pages.
        """
        if q.shape[0] == 0 or num_keys == 0:
            return q.new_empty((q.shape[0], num_keys), dtype=torch.float32)
        held = pages[: -(-num_keys // pool.page_size)]
        codes, scales = (plane.index_select(0, held) for plane in pool.planes)
        keys = (
            codes.flatten(0, 1)[:num_keys].view(torch.float8_e4m3fn),
            scales.flatten(1).view(torch.float32).flatten()[:num_keys],
        )
        return self._contiguous(query_codes(q, weights, scale), keys, count, is_clean=False)

    def index_scores_paged(
        self,
        q: Tensor,
        weights: Tensor,
        pool: PagedPool,
        pages: Tensor,
        count: Tensor,
        scale: float,
    ) -> Tensor:
        """Scores [M, P · 64] of rows that each have their own pages [M, P]."""
        num_rows, num_pages = pages.shape
        width = num_pages * pool.page_size
        if num_rows == 0 or width == 0:
            return q.new_full((num_rows, width), -math.inf, dtype=torch.float32)
        scores = self._paged(query_codes(q, weights, scale), pool, pages, count)
        return hide_tails(scores, count)

    def lazy_scores_paged(
        self,
        q: Tensor,
        weights: Tensor,
        pool: PagedPool,
        rows: RowPages,
        count: Tensor,
        scale: float,
        limits: tuple[int, int],
    ) -> Tensor:
        """[M, width] with ``limits`` = (width, least); defined below count[m]."""
        width = limits[0]
        if q.shape[0] == 0 or width == 0:
            return q.new_empty((q.shape[0], width), dtype=torch.float32)
        pages = rows.pages[:, : -(-width // PAGE_SIZE)]
        if rows.request is not None:
            pages = pages_of_rows(pages, rows.request, count)
        return self._paged(query_codes(q, weights, scale), pool, pages, count)[:, :width]

    def linear_fp8(
        self, x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """[M, N] of x_codes [M, K], codes [N, K].

        Many rows go by blocks of BLOCK_ROWS and the rest to triton: so they need one compiled
        kernel a weight, whatever M is, and a warm-up step has met it.
        """
        num_rows, num_columns = x_codes.shape[0], codes.shape[0]
        if dtype != torch.bfloat16 or num_columns % COLUMNS or x_codes.shape[1] % GROUP:
            return portable.linear_fp8(x_codes, x_scales, codes, scales, dtype)
        out = torch.empty((num_rows, num_columns), dtype=dtype, device=codes.device)
        weight = codes, scales
        first = 0
        while 3 * (num_rows - first) >= 2 * BLOCK_ROWS and num_rows >= BLOCK_ROWS:
            begin = min(first, num_rows - BLOCK_ROWS)  # a large rest takes rows again
            part = slice(begin, begin + BLOCK_ROWS)
            self._multiply((x_codes[part], x_scales[part]), weight, out[part])
            first = begin + BLOCK_ROWS
        if 0 < first < num_rows and x_codes.is_cuda:
            from gnomon.attention.providers.triton.linear import linear_into

            linear_into((x_codes[first:], x_scales[first:]), weight, out[first:])
        elif first < num_rows:
            self._multiply((x_codes[first:], x_scales[first:]), weight, out[first:])
        return out

    def _multiply(self, rows: Codes, weight: Codes, out: Tensor) -> None:
        self._library.fp8_gemm_nt(rows, weight, out, disable_ue8m0_cast=True)

    def _contiguous(self, query: Codes, keys: Codes, count: Tensor, is_clean: bool) -> Tensor:
        codes, folded = query
        scores: Tensor = self._library.fp8_mqa_logits(
            codes, keys, folded, torch.zeros_like(count), count, clean_logits=is_clean
        )
        return scores

    def _paged(self, query: Codes, pool: PagedPool, pages: Tensor, count: Tensor) -> Tensor:
        """[M, P · 64]; what it holds behind count[m] is garbage."""
        codes, folded = query
        lengths = count[:, None].contiguous()
        schedule = self._library.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, self._num_sms)
        scores: Tensor = self._library.fp8_paged_mqa_logits(
            codes[:, None],
            _pages_of(pool),
            folded,
            lengths,
            pages.to(torch.int32),
            schedule,
            pages.shape[1] * PAGE_SIZE,
            clean_logits=False,  # it cannot, where lengths are by row
        )
        return scores


def hide_tails(scores: Tensor, count: Tensor) -> Tensor:
    """−inf in the columns of scores [M, N] from count[m] on, in place."""
    if scores.is_cuda:
        from gnomon.attention.providers.external import launches

        return launches.hide_tails(scores, count)
    columns = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill_(columns >= count[:, None], -math.inf)


def pages_of_rows(pages: Tensor, request: Tensor, count: Tensor) -> Tensor:
    """[M, P] of pages [B, P] int32: row m's are those of request[m], as far as count[m] reaches."""
    if pages.is_cuda:
        from gnomon.attention.providers.external import launches

        return launches.pages_of_rows(pages, request, count, PAGE_SIZE)
    return pages.index_select(0, request.clamp_min(0))


def _pages_of(pool: PagedPool) -> Tensor:
    """The pool as [pages, 64, 1, 132] bytes: the shape that the library gives its two planes."""
    size, width = pool.page_size, pool.layout.bytes_per_token
    pages: Tensor = pool.storage[:, : size * width].view(-1, size, 1, width)
    return pages


def deepgemm_provider(places: Places) -> ExternalProvider:
    """The provider; the library is looked up when it is first asked for."""

    def load() -> Mapping[str, Kernel]:
        library = find(places)
        module: Any = Noting(library)
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        return usable(DeepGemm(module, num_sms).kernels(), library)

    return ExternalProvider(NAME, EXTERNAL_RANK, REQUIREMENTS, load)
