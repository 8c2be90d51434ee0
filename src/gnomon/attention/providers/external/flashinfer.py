"""FlashInfer: sparse MLA over bf16 latents by its MLA wrapper, a slot being a page of one token.

In:  what sparse_mla takes (spec/attention.py). Out: (out, lse) as there.
UNVERIFIED: written after the library's documentation and never run against it (it cannot be
installed where gnomon is tested); it is behind every other provider and has to be forced.
The wrapper plans on the host, so it runs outside graphs only. Its lse has base 2. Lists are padded
to one width, so row r's part of the page list starts at r · W.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dispatch import Requirement, Sizes
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.providers.external.padding import empty_is_minus
from gnomon.attention.providers.external.places import Places
from gnomon.attention.providers.external.provider import UNVERIFIED_RANK, ExternalProvider, Kernel
from gnomon.errors import MissingLibraryError

logger = logging.getLogger(__name__)

NAME = PACKAGE = "flashinfer"
WRAPPER = "BatchMLAPagedAttentionWrapper"
WORKSPACE_BYTES = 128 << 20  # what the library's documentation asks for

REQUIREMENTS = {
    "sparse_mla": Requirement(
        devices=frozenset({"cuda"}),
        capabilities=frozenset({8, 9, 10, 12}),
        dtypes=frozenset({torch.bfloat16}),
        layouts=frozenset({"bf16_576"}),
        sizes=(
            Sizes(("kv_lora_rank", "qk_rope_head_dim"), frozenset({(512, 64)})),
            Sizes.of("num_heads", range(1, 129)),
        ),
    )
}


class FlashInferMla:
    """Calls the library. ``make_wrapper(device)`` gives a BatchMLAPagedAttentionWrapper."""

    def __init__(self, make_wrapper: Callable[[torch.device], Any]) -> None:
        self._make_wrapper = make_wrapper
        self._wrapper: Any = None

    def kernels(self) -> Mapping[str, Kernel]:
        """By operator."""
        return {"sparse_mla": self.sparse_mla}

    def sparse_mla(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        pool: PagedPool,
        slots: Tensor,
        count: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Row r attends the first count[r] of its slots [R, W] (−1 behind)."""
        num_rows, num_heads, rank = q_latent.shape
        width, device = slots.shape[1], slots.device
        if num_rows == 0 or width == 0:
            lse = q_latent.new_full((num_rows, num_heads), -math.inf, dtype=torch.float32)
            return torch.zeros_like(q_latent), lse
        if self._wrapper is None:
            self._wrapper = self._make_wrapper(device)
        rows = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        entries = pool.typed()[:, None]
        self._wrapper.plan(
            rows,
            rows * width,
            slots.clamp_min(0).to(torch.int32).flatten(),
            count,
            num_heads,
            rank,
            q_rope.shape[-1],
            1,  # page size
            False,  # a list holds what its row may see
            scale,
            q_latent.dtype,
            entries.dtype,
        )
        out, lse = self._wrapper.run(
            q_latent, q_rope, entries[..., :rank], entries[..., rank:], return_lse=True
        )
        is_empty = (count == 0)[:, None]
        lse = empty_is_minus(lse * math.log(2.0)).masked_fill(is_empty, -math.inf)
        return out.masked_fill(is_empty[..., None], 0), lse


def flashinfer_provider(places: Places) -> ExternalProvider:
    """The provider; the library is looked up when it is first asked for."""

    def load() -> Mapping[str, Kernel]:
        make_wrapper = find(places)
        logger.warning(
            "flashinfer is unverified: gnomon's adapter has never run with it. It serves only "
            "where it is forced; compare its answers (gnomon verify) before you rely on them"
        )
        return FlashInferMla(make_wrapper).kernels()

    return ExternalProvider(NAME, UNVERIFIED_RANK, REQUIREMENTS, load)


def find(places: Places) -> Callable[[torch.device], Any]:
    """What makes a wrapper; UnsupportedError if the library is not here or lacks the class."""
    module: Any = places.module(PACKAGE, (f"mla.{WRAPPER}",))
    if module is None:
        raise MissingLibraryError("not installed; pip install flashinfer-python (unverified here)")

    def make(device: torch.device) -> Any:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return getattr(module.mla, WRAPPER)(workspace)

    return make
