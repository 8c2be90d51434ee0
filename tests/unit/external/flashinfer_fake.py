"""A stand-in for flashinfer.mla.BatchMLAPagedAttentionWrapper: plan, then run; lse in base 2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.unit.external.fakes import GARBAGE, attend


class MlaWrapper:
    """As its documentation says; rows without keys hold garbage."""

    def plan(self, *arguments: Any) -> None:
        first_row, first_id, ids, lengths, num_heads, rank, rope_dim, page_size, *rest = arguments
        is_causal, self.scale, q_dtype, kv_dtype = rest
        assert (page_size, is_causal, rank, rope_dim) == (1, False, 512, 64)
        assert q_dtype == kv_dtype == torch.bfloat16
        assert first_row.dtype == first_id.dtype == ids.dtype == lengths.dtype == torch.int32
        assert num_heads > 0
        assert torch.equal(first_row, torch.arange(len(first_row), dtype=torch.int32))
        assert int(first_id[-1]) == len(ids)
        assert bool((ids >= 0).all())
        self.lists = [
            ids[start : start + length].long()
            for start, length in zip(first_id.tolist(), lengths.tolist(), strict=False)
        ]

    def run(
        self, q_latent: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        assert return_lse
        assert latents.shape[1] == ropes.shape[1] == 1
        out = torch.full_like(q_latent, GARBAGE)
        lse = torch.full(q_latent.shape[:2], GARBAGE)
        for row, ids in enumerate(self.lists):
            if len(ids):
                query = torch.cat((q_latent[row], q_rope[row]), -1)
                entries = torch.cat((latents[ids, 0], ropes[ids, 0]), -1)
                one, level = attend(query, entries, 512, self.scale)
                out[row], lse[row] = one.to(out.dtype), (level / math.log(2)).float()
        return out, lse
