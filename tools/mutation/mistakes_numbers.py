"""Mistakes picked by hand in cache formats and operators: bytes, scales, ties, NaN, merges.

In:  nothing. Out: `MISTAKES`, data only (see mistakes_attention.py).
"""

from __future__ import annotations

from tools.mutation.mutant import Mistake

LAYOUTS = "src/gnomon/attention/layouts/"
OPS = "src/gnomon/attention/ops/"
TORCH = "src/gnomon/attention/providers/torch/"
FLOAT8 = ("tests/unit/layouts/test_float8.py", "tests/unit/layouts/test_bytes.py")
POOLS = ("tests/unit/layouts/test_pools.py",)
MERGE = ("tests/laws/test_merge_partitions.py",)
TOPK = ("tests/laws/test_topk_order.py",)
SELECT = ("tests/unit/ops/test_select.py",)
OPERATORS = ("tests/unit/ops/test_operators.py",)
SPECS = ("tests/unit/ops/test_specs.py",)

MISTAKES = (
    Mistake("latent-floor", "scale floor dropped", LAYOUTS + "float8.py",
            "(amax / E4M3_MAX).clamp_min(MIN_LATENT_SCALE)", "amax / E4M3_MAX", FLOAT8),
    Mistake("floors-mixed", "scale floor of the other format", LAYOUTS + "float8.py",
            "amax.clamp_min(MIN_INDEX_AMAX) / E4M3_MAX",
            "(amax / E4M3_MAX).clamp_min(MIN_INDEX_AMAX)", FLOAT8),
    Mistake("nan-stored", "NaN not stored as NaN", LAYOUTS + "float8.py",
            "codes.where(wide.abs() < torch.inf, NAN_CODE)", "codes", FLOAT8),
    Mistake("inf-in-scale", "infinity takes part in the scale", LAYOUTS + "float8.py",
            "magnitude.where(is_finite, 0.0).amax", "magnitude.amax", FLOAT8),
    Mistake("rope-half", "rope bytes as another float", LAYOUTS + "fp8_ds_mla_656.py",
            "rows[..., scales_end:].view(torch.bfloat16)",
            "rows[..., scales_end:].view(torch.float16)", FLOAT8),
    Mistake("scale-plane", "scales of a page found as if rows", LAYOUTS + "pool.py",
            "begin = end\n", "begin += width\n", FLOAT8),
    Mistake("mid-page", "range that starts inside a page", LAYOUTS + "pool.py",
            "pages[begin:end], start - begin * self.page_size", "pages[begin:end], 0", POOLS),
    Mistake("slot-minus-one", "slot -1 written", LAYOUTS + "rows.py",
            "and int(slots.min()) < 0:", "and int(slots.min()) < -1:", POOLS),
    Mistake("merge-weight", "dropped merge weight", TORCH + "attention.py",
            "* weight_a[..., None] + widen(out_b)", "+ widen(out_b)", MERGE),
    Mistake("lse-base", "lse in base 2", TORCH + "attention.py",
            "lse = anchor + total.log()", "lse = anchor + total.log2()", MERGE),
    Mistake("dense-causal", "off-by-one causal length", TORCH + "attention.py",
            "columns[least:most] >= visible", "columns[least:most] > visible", SPECS),
    Mistake("ties-higher", "ties to the higher position", TORCH + "topk.py",
            "values, order = clean.sort(dim=1, descending=True, stable=True)",
            "values, order = clean.flip(1).sort(dim=1, descending=True, stable=True)\n"
            "    order = clean.shape[1] - 1 - order", TOPK),
    Mistake("nan-unflagged", "NaN not flagged", TORCH + "topk.py",
            "loose.isnan().any(1)", "loose.isnan().all(1)",
            (*SELECT, *TOPK)),
    Mistake("nan-of-early-chunk", "NaN of an earlier chunk not flagged", OPS + "select.py",
            "nan_rows | last.nan_rows", "last.nan_rows", SELECT),
    Mistake("chunk-columns", "columns of a chunk taken for positions", OPS + "select.py",
            "chunk.key_start, chunk.key_stop, dtype=",
            "0, chunk.key_stop - chunk.key_start, dtype=", SELECT),
    Mistake("paged-rows", "page table row of the neighbour", OPS + "select.py",
            "pages.index_select(0, ", "pages.roll(1, 0).index_select(0, ", SELECT),
    Mistake("last-segment-wins", "segments not merged", OPS + "attend.py",
            "merged = one if merged is None else kernels[\"lse_merge\"](*merged, *one)",
            "merged = one", OPERATORS),
    Mistake("sink-sign", "share of the sink for that of the keys", OPS + "attend.py",
            "lse - sink.to(lse.dtype)", "sink.to(lse.dtype) - lse", OPERATORS),
    Mistake("rope-roll", "rotation of the wrong partner", TORCH + "norms.py",
            "part.roll(dim // 2, -1)", "part.flip(-1)", SPECS),
)  # fmt: skip
