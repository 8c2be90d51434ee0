"""Stand-ins for the libraries that adapters call: their contracts (kernels.md §1, §3) in loops.

They refuse what the libraries refuse, leave garbage where the libraries do, and follow their
conventions of lse. CPU tensors, any sizes that keep to the rules.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout

GARBAGE = 12345.0


def attend(query: Tensor, entries: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """One row [H, D] over entries [n, D], n > 0: (out [H, rank], lse [H]) in float64."""
    logits = query.double() @ entries.double().T * scale
    weights = logits.softmax(-1)
    return weights @ entries[:, :rank].double(), logits.logsumexp(-1)


class FlashMlaOperators:
    """torch.ops._flashmla_C; counts how often a schedule is made."""

    def __init__(self) -> None:
        self.num_schedules = 0

    def sparse_prefill_fwd(
        self, q: Tensor, kv: Tensor, lists: Tensor, scale: float, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        value_dim, sink, lengths, out_buffer = rest
        assert (value_dim, sink, out_buffer) == (512, None, None)
        num_rows, num_heads, dim = q.shape
        assert num_rows > 0
        assert num_heads in (64, 128)
        assert dim == 576
        assert q.dtype == kv.dtype == torch.bfloat16
        assert q.stride(-1) == kv.stride(-1) == lists.stride(-1) == 1
        assert lists.dtype == lengths.dtype == torch.int32
        assert lists.shape[:2] == (num_rows, 1)
        assert lists.shape[2] % 128 == 0
        assert lists.shape[2] > 0
        assert kv.shape[1:] == (1, 576)
        out = torch.zeros(num_rows, num_heads, 512, dtype=q.dtype)
        lse = torch.full((num_rows, num_heads), math.inf)
        for row in range(num_rows):
            ids = lists[row, 0, : lengths[row]].long()
            ids = ids[(ids >= 0) & (ids < kv.shape[0])]
            if len(ids):
                one, level = attend(q[row], kv[ids, 0], 512, scale)
                out[row], lse[row] = one.to(q.dtype), level.float()
        return out, lse, lse.clone()

    def sparse_decode_fwd(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, pages, lists, lengths, sink, plan, splits, *extra, value_dim, scale, buffer = arguments
        assert len(arguments) == 13
        assert lengths is sink is buffer is None
        assert extra == [None, None, None]
        assert value_dim == 512
        batch, num_rows, num_heads, dim = q.shape
        assert batch > 0
        assert num_rows > 0
        assert num_heads in (64, 128)
        assert dim == 576
        assert q.dtype == torch.bfloat16
        assert pages.dtype == torch.uint8
        assert pages.shape[2:] == (1, 656)
        assert pages.stride(1) == 656
        assert lists.shape[:2] == (batch, num_rows)
        assert lists.dtype == torch.int32
        assert lists.shape[2] % 64 == 0
        assert (plan is None) == (splits is None)
        shape = torch.tensor([batch, num_rows, num_heads, lists.shape[2]])
        if plan is None:
            self.num_schedules += 1
            plan = shape
        assert torch.equal(plan, shape), "a schedule of another shape"
        entries = Fp8LatentLayout(512, 64).dequantise(pages.flatten(0, 2))
        out = torch.zeros(batch, num_rows, num_heads, 512, dtype=q.dtype)
        lse = torch.full((batch, num_rows, num_heads), math.inf)
        for b in range(batch):
            for row in range(num_rows):
                ids = lists[b, row].long()
                assert int(ids.max()) < len(entries), "an illegal access"
                ids = ids[ids != -1]
                if len(ids):
                    one, level = attend(q[b, row], entries[ids], 512, scale)
                    out[b, row], lse[b, row] = one.to(q.dtype), level.float()
        return out, lse.transpose(1, 2), plan, plan


class Fa3Operators:
    """torch.ops._vllm_fa3_C."""

    def fwd(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert len(arguments) == 37
        q, k, v, *new, q_v, out = arguments[:7]
        first_row, *nothing, num_keys = arguments[7:12]
        most_rows, most_keys, table = arguments[12:15]
        scale, is_causal = arguments[23:25]
        assert new == [None, None]
        assert nothing == [None, None, None]
        assert all(value is None for value in arguments[15:23])
        assert arguments[25:30] == (-1, -1, 0.0, True, None)
        assert arguments[30] in (0, 1)  # splits
        assert arguments[31:] == (None, 0, None, 1, 0, None)
        assert q.dtype == k.dtype == v.dtype
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        assert first_row.dtype == num_keys.dtype == torch.int32
        if out is None:
            out = torch.full((*q.shape[:2], v.shape[-1]), GARBAGE, dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), GARBAGE)
        for b in range(len(first_row) - 1):
            start, stop, seen = int(first_row[b]), int(first_row[b + 1]), int(num_keys[b])
            assert 0 <= start <= stop <= len(q)
            assert stop - start <= most_rows
            assert 0 <= seen <= most_keys
            if table is None:
                keys, values = k[b, :seen], v[b, :seen]
            else:
                assert table.dtype == torch.int32
                ids = table[b, :seen].long()
                assert bool((ids >= 0).all())
                keys, values = k[ids].flatten(0, 1), v[ids].flatten(0, 1)
            for row in range(start, stop):
                n = max(0, seen - (stop - 1 - row)) if is_causal else seen
                level, one = _heads(q, q_v, keys[:n], values[:n], row, scale)
                out[row], lse[:, row] = one.to(q.dtype), level
        return out, lse, out, lse


def _heads(
    q: Tensor, q_v: Tensor | None, keys: Tensor, values: Tensor, row: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(lse [H], out [H, Dv]) of one row over keys [n, Hk, D], values [n, Hk, Dv]."""
    num_heads = q.shape[1]
    keys, values = (t.double().expand(-1, num_heads, -1) for t in (keys, values))
    logits = torch.einsum("hd,nhd->hn", q[row].double(), keys)
    if q_v is not None:
        logits = logits + torch.einsum("hd,nhd->hn", q_v[row].double(), values)
    if not len(keys):
        return torch.full((num_heads,), -math.inf), torch.zeros(num_heads, values.shape[-1])
    logits = logits * scale
    weights = torch.einsum("hn,nhd->hd", logits.softmax(-1), values)
    return logits.logsumexp(-1).float(), weights


class DeepGemmModule:
    """The package deep_gemm."""

    __version__ = "2.5.0"

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
        codes, scales = kv
        self._check_query(q, weights)
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.is_contiguous()
        assert scales.shape == codes.shape[:1]
        assert scales.dtype == torch.float32
        assert first_key.dtype == stop_key.dtype == torch.int32
        wide = torch.full((len(q), len(codes) + 256), GARBAGE)
        for row, stop in enumerate(stop_key.tolist()):
            if clean_logits:
                wide[row] = -math.inf
            wide[row, :stop] = _scores(q[row], codes[:stop].float(), weights[row]) * scales[:stop]
        return wide[:, : len(codes)]

    def get_paged_mqa_logits_metadata(self, lengths: Tensor, page: int, num_sms: int) -> Tensor:
        assert lengths.dtype == torch.int32
        assert lengths.dim() == 2
        assert page == 64
        return torch.zeros(num_sms + 1, 2, dtype=torch.int32)

    def fp8_paged_mqa_logits(self, *arguments: Any, clean_logits: bool) -> Tensor:
        q, pages, weights, lengths, table, schedule, most = arguments
        assert not clean_logits
        batch, next_n, _, dim = q.shape
        assert next_n == 1
        assert dim == 128
        self._check_query(q[:, 0], weights)
        assert pages.shape[1:] == (64, 1, 132)
        assert (pages.stride(1), pages.stride(3)) == (132, 1)
        assert pages.dtype == torch.uint8
        assert lengths.shape == (batch, 1)
        assert table.dtype == torch.int32
        assert table.stride(1) == 1
        assert schedule.shape[1] == 2
        scores = torch.full((batch, most), GARBAGE)
        for row in range(batch):
            for column in range(int(lengths[row, 0])):
                page = pages[int(table[row, column // 64])].flatten()
                inside = column % 64
                codes = page[inside * 128 : (inside + 1) * 128].view(torch.float8_e4m3fn)
                at = 64 * 128 + 4 * inside
                scale = page[at : at + 4].clone().view(torch.float32)
                score = _scores(q[row, 0], codes.float()[None], weights[row]) * scale
                scores[row, column] = score[0]
        return scores

    def fp8_gemm_nt(
        self,
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        *,
        disable_ue8m0_cast: bool,
    ) -> None:
        assert disable_ue8m0_cast, "scales are not to be rounded"
        (m, k), (n, _) = a[0].shape, b[0].shape
        assert m > 0
        assert k % 128 == 0
        assert n % 64 == 0
        assert a[0].dtype == b[0].dtype == torch.float8_e4m3fn
        assert a[0].is_contiguous()
        assert b[0].is_contiguous()
        assert a[1].shape == (m, k // 128)
        assert b[1].shape == (-(-n // 128), k // 128)
        assert d.shape == (m, n)
        assert d.dtype == torch.bfloat16
        rows = a[0].double() * a[1].double().repeat_interleave(128, 1)
        blocks = b[1].double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        d.copy_(rows @ (b[0].double() * blocks).T)

    def m_grouped_fp8_gemm_nt_contiguous(
        self,
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        experts: Tensor,
        *,
        disable_ue8m0_cast: bool,
    ) -> None:
        assert experts.dtype == torch.int32
        assert experts.shape == a[0].shape[:1]
        assert len(experts) % 128 == 0
        d.fill_(torch.nan)  # memory that nobody writes
        for start in range(0, len(experts), 128):
            block = slice(start, start + 128)
            expert = int(experts[start])
            if expert >= 0:
                assert bool((experts[block] == expert).all()), "a block of two experts"
                pair = b[0][expert], b[1][expert]
                rows = a[0][block], a[1][block]
                self.fp8_gemm_nt(rows, pair, d[block], disable_ue8m0_cast=disable_ue8m0_cast)

    def _check_query(self, q: Tensor, weights: Tensor) -> None:
        assert q.dtype == torch.float8_e4m3fn
        assert q.is_contiguous()
        assert q.shape[1] in (32, 64)
        assert weights.dtype == torch.float32
        assert weights.is_contiguous()
        assert weights.shape == q.shape[:2]


def _scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores [n] of q [H, D] and keys [n, D]; the relu drops NaN, as fmaxf does."""
    heads = (q.float() @ keys.T).nan_to_num(0.0).clamp_min(0)
    return (weights[:, None] * heads).sum(0)
