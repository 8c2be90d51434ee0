"""FlashAttention 3: dense MHA, and sparse MLA over plain latents by pages of one token.

In:  what dense_mha and sparse_mla take (spec/attention.py). Out: (out, lse) as there.
Sparse: a slot is a page of one token; rope columns are the keys, latents the values, and the
latent query goes in as q_v (kernels.md §1.10). Any number of heads, prefill and decode alike. Of
up to some thousand rows the library takes one for long and the others for short, and sets aside
fp32 results of as many splits as the long one would like: gigabytes. Many rows ask for one split.
Dense: visible counts rise by one from row to row up to the number of keys; the rows up to the first
that sees every key are causal, those behind it see all, so two calls cover them, with bounds that
stay on the device. Rows that see nothing give 0 and −inf wherever they stand.
Found as `flash_attn_interface`, as vLLM's `_vllm_fa3_C.abi3.so`, or in --provider-path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dispatch import Requirement, Sizes
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.attend import SparseMlaKernel
from gnomon.attention.providers.external.padding import empty_is_minus
from gnomon.attention.providers.external.places import Places, missing
from gnomon.attention.providers.external.provider import EXTERNAL_RANK, ExternalProvider, Kernel

NAME = "fa3"
MOST_ROWS = 8192  # whose numbers are kept
SPLIT_ROWS = 128  # with more, lists are not split: they fill a GPU as they are
URL = "https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"
FILE, PACKAGE = "_vllm_fa3_C.abi3.so", "flash_attn_interface"
NUM_ARGUMENTS = 37  # of vLLM's build

_ON_HOPPER = frozenset({9})
_HALF = frozenset({torch.bfloat16, torch.float16})
REQUIREMENTS = {
    "dense_mha": Requirement(
        devices=frozenset({"cuda"}),
        capabilities=_ON_HOPPER,
        dtypes=_HALF,
        sizes=(
            Sizes(("qk_head_dim", "v_head_dim"), frozenset({(192, 128), (128, 128), (256, 256)})),
        ),
        can_capture=True,
    ),
    "sparse_mla": Requirement(
        devices=frozenset({"cuda"}),
        capabilities=_ON_HOPPER,
        dtypes=_HALF,
        layouts=frozenset({"bf16_576", "fp16_576"}),
        sizes=(
            Sizes(("kv_lora_rank", "qk_rope_head_dim"), frozenset({(512, 64)})),
            Sizes.of("num_heads", range(1, 129)),
        ),
        can_capture=True,
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the library. Bounds and numbers of keys are int32 on the device.

    q [T, H, D]; k [B, N, Hk, D] and v, or pages [pages, 1, Hk, D] with ``table`` [B, W]; q_v
    [T, H, Dv]. Sequence b has the rows first_row[b] .. first_row[b + 1] − 1, at most ``most_rows``,
    and the first num_keys[b] keys; a causal mask is aligned to its last row and last key. Rows of
    ``out`` [T, H, Dv] that belong to no sequence stay as they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    first_row: Tensor
    num_keys: Tensor
    most_rows: int
    scale: float
    is_causal: bool
    q_v: Tensor | None = None
    table: Tensor | None = None
    out: Tensor | None = None
    num_splits: int = 0  # of each sequence's keys; 0: as many as the library likes


Forward = Callable[[Call], tuple[Tensor, Tensor]]
"""-> (out [T, H, Dv], lse [H, T])."""


class FlashAttention3:
    """Calls the library."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._rows: Tensor | None = None

    def kernels(self) -> Mapping[str, Kernel]:
        """By operator."""
        sparse_mla = SparseMlaKernel(self.sparse_mla, self.values)
        return {"dense_mha": self.dense_mha, "sparse_mla": sparse_mla}

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
        if q_latent.shape[0] == 0 or slots.shape[1] == 0:
            return _nothing(q_latent, q_latent.shape[2])
        out, lse = self._attended(q_latent, q_rope, pool, (slots, count), scale)
        return out, empty_is_minus(lse.T)

    def values(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        pool: PagedPool,
        slots: Tensor,
        count: Tensor,
        scale: float,
    ) -> Tensor:
        """The first of sparse_mla's results: a launch less."""
        if q_latent.shape[0] == 0 or slots.shape[1] == 0:
            return _nothing(q_latent, q_latent.shape[2])[0]
        return self._attended(q_latent, q_rope, pool, (slots, count), scale)[0]

    def _attended(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        pool: PagedPool,
        listed: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """(out [R, H, D_c], lse [H, R] in the library's convention); ``listed``: slots, count."""
        slots, count = listed
        num_rows, _, rank = q_latent.shape
        entries = pool.typed()
        call = Call(
            q=q_rope,
            k=entries[:, rank:].view(-1, 1, 1, q_rope.shape[-1]),
            v=entries[:, :rank].view(-1, 1, 1, rank),
            q_v=q_latent,
            first_row=self._row_numbers(num_rows, slots.device),
            num_keys=count,
            most_rows=1,
            table=slots.to(torch.int32),
            scale=scale,
            is_causal=True,
            num_splits=0 if num_rows <= SPLIT_ROWS else 1,
        )
        return self._forward(call)

    def _row_numbers(self, num_rows: int, device: torch.device) -> Tensor:
        """0 .. num_rows. Kept once and for good: captured graphs hold its address."""
        kept = self._rows
        if kept is None or num_rows > MOST_ROWS or kept.device != device:
            rows = torch.arange(max(MOST_ROWS, num_rows) + 1, dtype=torch.int32, device=device)
            # What is made while a graph is captured holds its numbers only once that graph runs.
            if kept is None and not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._rows = rows[: MOST_ROWS + 1]
            kept = rows
        return kept[: num_rows + 1]

    def dense_mha(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Row m of q [M, H, D] attends the first visible[m] of k [N, H, D], v [N, H, Dv]."""
        num_rows, num_keys = q.shape[0], k.shape[0]
        if num_rows == 0 or num_keys == 0:
            return _nothing(q, v.shape[-1])
        is_blind = visible == 0
        causal, seen = _causal_part(visible, is_blind, num_keys)
        out = q.new_empty((num_rows, q.shape[1], v.shape[-1]))
        upper = Call(q, k[None], v[None], causal[:2], seen, num_rows, scale, True, out=out)
        every = torch.full_like(seen, num_keys)
        lower = replace(upper, first_row=causal[1:], num_keys=every, is_causal=False)
        lse_upper, lse_lower = (self._forward(call)[1].T for call in (upper, lower))
        is_upper = torch.arange(num_rows, device=q.device) < causal[1]
        lse = torch.where(is_upper[:, None], lse_upper, lse_lower)
        return _clear_blind(out, empty_is_minus(lse), visible)


def _clear_blind(out: Tensor, lse: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that see nothing: those in the middle of others were taken for causal ones."""
    if out.is_cuda:
        from gnomon.attention.providers.external.launches import clear_blind

        clear_blind(out, lse, visible)
        return out, lse
    is_blind = (visible == 0)[:, None]
    return out.masked_fill(is_blind[..., None], 0), lse.masked_fill(is_blind, -math.inf)


def _causal_part(visible: Tensor, is_blind: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """([0, rows of the causal part, all rows], [keys that its last row sees]), int32, no sync.

    Row m sees offset + m keys, or all of them: the offset is the largest visible[m] − m.
    """
    num_rows = visible.shape[0]
    rows = torch.arange(num_rows, dtype=torch.int32, device=visible.device)
    offset = (visible - rows).masked_fill(is_blind, -num_rows).amax()
    num_causal = (num_keys - offset + 1).clamp(0, num_rows)
    bounds = torch.stack((num_causal - num_causal, num_causal, rows[-1] + 1))
    seen = (offset + num_causal - 1).clamp(0, num_keys)
    return bounds.to(torch.int32), seen.to(torch.int32)[None]


def fa3_provider(places: Places) -> ExternalProvider:
    """The provider; the library is looked up when it is first asked for."""

    def load() -> Mapping[str, Kernel]:
        return FlashAttention3(find(places)).kernels()

    return ExternalProvider(NAME, EXTERNAL_RANK, REQUIREMENTS, load)


def find(places: Places) -> Forward:
    """The library; UnsupportedError if it is nowhere, cannot be loaded or lacks the function."""
    operators = places.operators(FILE, "_vllm_fa3_C", {"fwd": NUM_ARGUMENTS})
    if operators is not None:
        return forward_of_operators(operators)
    module = places.module(PACKAGE, ("flash_attn_with_kvcache",))
    if module is not None:
        return forward_of_module(module)
    raise missing(PACKAGE, URL, f"{FILE} (or .so.xz)")


def forward_of_operators(operators: Any) -> Forward:
    """The build of vLLM: 37 positional arguments."""

    def forward(call: Call) -> tuple[Tensor, Tensor]:
        pages = 1 if call.table is None else call.table.shape[1]
        result = operators.fwd(
            *(call.q, call.k, call.v, None, None, call.q_v, call.out),  # no keys to append
            *(call.first_row, None, None, None, call.num_keys),
            *(call.most_rows, pages * call.k.shape[1], call.table, None, None),
            *(None, None, None),  # rotary embedding
            *(None, None, None),  # scales of FP8
            *(call.scale, call.is_causal, -1, -1, 0.0, True),  # no window, no soft cap
            *(None, call.num_splits),  # schedule: its choice
            *(None, 0, None),  # packing, spare SMs: its choice; no sink
            *(1, 0, None),  # one context-parallel rank
        )
        return result[0], result[1]

    return forward


def forward_of_module(module: Any) -> Forward:
    """The package `flash_attn_interface`."""

    def forward(call: Call) -> tuple[Tensor, Tensor]:
        result = module.flash_attn_with_kvcache(
            call.q,
            call.k,
            call.v,
            qv=call.q_v,
            cache_seqlens=call.num_keys,
            page_table=call.table,
            cu_seqlens_q=call.first_row,
            max_seqlen_q=call.most_rows,
            softmax_scale=call.scale,
            causal=call.is_causal,
            num_splits=call.num_splits,
            return_softmax_lse=True,
        )
        out, lse = result[0], result[1]
        if call.out is None:
            return out, lse
        rows = torch.arange(call.q.shape[0], device=call.q.device)
        is_own = (rows >= call.first_row[0]) & (rows < call.first_row[1])
        call.out.copy_(torch.where(is_own[:, None, None], out, call.out))
        return call.out, lse

    return forward


def _nothing(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Results of rows that see no key at all, or of no rows."""
    out = q.new_zeros((*q.shape[:2], width))
    return out, q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
