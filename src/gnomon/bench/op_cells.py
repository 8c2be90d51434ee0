"""Which operators are timed at which sizes, and what is aimed at.

In:  a device kind. Out: OpCells. On CUDA the sizes of DeepSeek-V3.2 and GLM-5, whole models and one
     rank of eight; on a CPU sizes that finish in seconds and show that everything runs.
Every OpSpec has a cell on either kind. A cell's size names its phase where the choice of a provider
hangs on it, and its rows first: tools/rank_providers.py reads them.
Not here: the numbers themselves (op_inputs*.py), the clock (timing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gnomon.attention.dispatch import OpNeed
from gnomon.attention.spec.model import Arguments
from gnomon.bench import op_inputs, op_inputs_fp8
from gnomon.bench.op_inputs import PAGE, Material

MANY_ROWS = 128  # a step of more is no decode step, and is not captured whole
LINEARS = (
    ("q_b of 128 heads", 24576, 1536),
    ("o of 128 heads", 7168, 16384),
    ("o of 16 heads", 7168, 2048),
)
"""FP8 linears of DeepSeek-V3.2 and of one rank of eight: outputs, inputs."""
BF16_LATENTS, FP8_LATENTS, FP8_INDEX = "bf16_576", "fp8_ds_mla_656", "index_k_132"


@dataclass(frozen=True, slots=True)
class OpCell:
    """One operator at one size. ``in_graph``: timed as replay of a captured graph, as in decode.

    ``aims``: anchor provider -> least ratio (its time / ours) that the portable kernels must reach.
    """

    op: str
    size: str
    make: Callable[[Material], Arguments]
    need: OpNeed
    in_graph: bool = False
    aims: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """Unique: ``sparse_mla prefill h128``."""
        return f"{self.op} {self.size}"


def op_cells(device: str) -> tuple[OpCell, ...]:
    """All cells of a device kind, "cuda" or "cpu"."""
    return _cuda_cells() if device == "cuda" else _cpu_cells()


def _need(latent: str | None = None, index: str | None = None, device: str = "cuda") -> OpNeed:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    has_gpu = device == "cuda" and torch.cuda.is_available()
    return OpNeed(
        device=device,
        dtype=dtype,
        latent_layout=latent,
        index_layout=index,
        page_size=PAGE,
        capability=torch.cuda.get_device_capability() if has_gpu else None,
    )


def _cuda_cells() -> tuple[OpCell, ...]:
    """Those with aims first, in case that a run is cut off."""
    sparse = *_prefill_cells(), *_decode_cells("fp8", FP8_LATENTS)
    others = *_other_cells(), *_fp8_cells(), *_decode_cells("bf16", BF16_LATENTS)
    return (*sparse, *_index_cells(), *others)


def _prefill_cells() -> tuple[OpCell, ...]:
    bf16 = _need(BF16_LATENTS)
    return tuple(
        OpCell(
            "sparse_mla",
            f"prefill 4096 rows h{heads}, 32k keys, bf16",
            partial(
                op_inputs.sparse_mla,
                layout=BF16_LATENTS, num_rows=4096, num_heads=heads, num_keys=32768,
            ),
            bf16,
            aims=(("flashmla", 0.42 if heads > 16 else 1.0),),
        )
        for heads in (128, 64, 16)
    )  # fmt: skip


def _decode_cells(kind: str, layout: str) -> tuple[OpCell, ...]:
    need = _need(layout)
    return tuple(
        OpCell(
            "sparse_mla",
            f"decode b{batch} h{heads}, {kind}",
            partial(
                op_inputs.sparse_mla,
                layout=layout, num_rows=batch, num_heads=heads, num_keys=1 << 20,
            ),
            need,
            in_graph=True,
            aims=(("flashmla", _decode_aim(batch, heads)),) if kind == "fp8" else (),
        )
        for heads in (16, 64, 128)
        for batch in (1, 16, 64, 128)
    )  # fmt: skip


def _decode_aim(batch: int, heads: int) -> float:
    if batch == 1:
        return 0.90
    return 0.65 if heads == 16 else 0.56


def _index_cells() -> tuple[OpCell, ...]:
    fp8 = _need(index=FP8_INDEX)
    whole = [
        OpCell(
            "index_scores",
            f"2048 rows, 64k keys, H{heads}",
            partial(op_inputs.index_scores, num_rows=2048, num_keys=65536, num_heads=heads),
            fp8,
            aims=(("deepgemm", 0.88),),
        )
        for heads in (64, 32)
    ]
    paged = [
        OpCell(
            "index_scores_paged",
            f"b{batch}, {keys // 1024}k keys, H64",
            partial(op_inputs.index_scores_paged, num_rows=batch, num_keys=keys, num_heads=64),
            fp8,
            in_graph=True,
            aims=(("deepgemm", 0.94),) if batch >= 64 else (),
        )
        for batch, keys in ((256, 8192), (64, 32768), (1, 131072))
    ]
    ranked = [
        OpCell(
            "topk",
            f"{rows} x {keys // 1024}k",
            partial(op_inputs.topk, num_rows=rows, num_keys=keys),
            fp8,
            in_graph=rows <= 64,
            aims=(("vllm", 1 / 1.5),) if rows >= 64 else (),
        )
        for rows, keys in ((4096, 65536), (64, 131072), (1, 131072), (64, 8192))
    ]
    return (*whole, *paged, *ranked)


def _other_cells() -> tuple[OpCell, ...]:
    bf16, fp8 = _need(BF16_LATENTS, FP8_INDEX), _need(FP8_LATENTS, FP8_INDEX)
    written = [
        cell
        for layout, need in ((BF16_LATENTS, bf16), (FP8_LATENTS, fp8))
        for cell in (
            OpCell(
                "latent_write",
                f"16k rows, {layout}",
                partial(op_inputs.latent_write, layout=layout, num_rows=16384),
                need,
            ),
            OpCell(
                "context_gather",
                f"128k keys, {layout}",
                partial(op_inputs.context_gather, layout=layout, num_keys=131072),
                need,
            ),
        )
    ]
    prepared = partial(op_inputs.index_prepare, num_rows=16384, num_heads=64)
    dense = [
        OpCell(
            "dense_mha",
            f"causal 4096 rows h{heads}",
            partial(op_inputs.dense_mha, num_rows=4096, num_heads=heads),
            bf16,
        )
        for heads in (128, 16)
    ]
    mixed = [
        OpCell("moe", f"{rows} rows, 32 experts x 2048, bf16", partial(
            op_inputs.moe, num_rows=rows, num_experts=32, width=2048), bf16, in_graph=rows <= 128)
        for rows in (64, 4096)
    ]  # fmt: skip
    norm = partial(op_inputs.rms_norm, num_rows=16384, width=7168)
    key_norm = partial(op_inputs.layer_norm, num_rows=16384, width=128)
    turned = partial(op_inputs.rope, num_rows=4096, num_heads=128)
    merge = partial(op_inputs.lse_merge, num_rows=4096, num_heads=128)
    return (
        *written,
        OpCell("index_prepare", "16k rows, H64", prepared, fp8),
        *dense,
        OpCell("lse_merge", "4096 rows h128", merge, bf16),
        OpCell("rms_norm", "16k x 7168", norm, bf16),
        OpCell("layer_norm", "16k x 128", key_norm, bf16),
        OpCell("rope", "4096 rows h128", turned, bf16),
        *mixed,
    )


def _fp8_cells() -> tuple[OpCell, ...]:
    """Operators of FP8 weights; those of a decode step as replays of a graph."""
    need = _need(FP8_LATENTS, FP8_INDEX)
    linears = [
        OpCell(
            "linear_fp8",
            f"{_phase(rows)} {rows} rows, {name}",
            partial(op_inputs_fp8.linear_fp8, num_rows=rows, columns=columns, depth=depth),
            need,
            in_graph=rows <= MANY_ROWS,
        )
        for name, columns, depth in LINEARS
        for rows in (1, 64, 4096, 8192)
    ]
    experts = [
        OpCell(
            "moe_fp8",
            f"{_phase(rows)} {rows} rows, {count} experts x {width}",
            partial(op_inputs_fp8.moe_fp8, num_rows=rows, num_experts=count, width=width),
            need,
            in_graph=rows <= MANY_ROWS,
        )
        for count, width in ((32, 2048), (256, 256))
        for rows in (1, 64, 4096, 8192)
    ]
    quantised = partial(op_inputs_fp8.quantise_rows, num_rows=16384, width=7168)
    silu = partial(op_inputs_fp8.silu_quantise, num_rows=16384, width=2048)
    return (
        OpCell("quantise_rows", "16k x 7168", quantised, need),
        OpCell("silu_quantise", "16k x 2 x 2048", silu, need),
        *linears,
        *experts,
    )


def _phase(num_rows: int) -> str:
    return "decode" if num_rows <= MANY_ROWS else "prefill"


def _cpu_cells() -> tuple[OpCell, ...]:
    need = _need("fp32_576", "fp32_128", device="cpu")
    cells = (
        ("sparse_mla", "64 rows h16", partial(
            op_inputs.sparse_mla,
            layout="float32", num_rows=64, num_heads=16, num_keys=1024, width=256)),
        ("index_scores", "64 rows, 1k keys", partial(
            op_inputs.index_scores, num_rows=64, num_keys=1024, num_heads=32)),
        ("topk", "64 x 4k", partial(op_inputs.topk, num_rows=64, num_keys=4096, k=256)),
        ("latent_write", "256 rows", partial(
            op_inputs.latent_write, layout="float32", num_rows=256)),
        ("context_gather", "4k keys", partial(
            op_inputs.context_gather, layout="float32", num_keys=4096)),
        ("dense_mha", "128 rows h8", partial(op_inputs.dense_mha, num_rows=128, num_heads=8)),
        ("rms_norm", "256 x 2048", partial(op_inputs.rms_norm, num_rows=256, width=2048)),
        ("lse_merge", "128 rows h16", partial(op_inputs.lse_merge, num_rows=128, num_heads=16)),
        ("index_prepare", "256 rows, H32", partial(
            op_inputs.index_prepare, num_rows=256, num_heads=32, layout="float32")),
        ("index_scores_paged", "b8, 1k keys, H32", partial(
            op_inputs.index_scores_paged,
            num_rows=8, num_keys=1024, num_heads=32, layout="float32")),
        ("layer_norm", "256 x 128", partial(op_inputs.layer_norm, num_rows=256, width=128)),
        ("rope", "128 rows h16", partial(op_inputs.rope, num_rows=128, num_heads=16)),
        ("moe", "16 rows, 16 experts x 128", partial(
            op_inputs.moe, num_rows=16, num_experts=16, width=128, hidden=512)),
        ("quantise_rows", "256 x 2048", partial(
            op_inputs_fp8.quantise_rows, num_rows=256, width=2048)),
        ("silu_quantise", "256 x 2 x 512", partial(
            op_inputs_fp8.silu_quantise, num_rows=256, width=512)),
        ("linear_fp8", "16 rows, 512 x 1024", partial(
            op_inputs_fp8.linear_fp8, num_rows=16, columns=512, depth=1024)),
        ("moe_fp8", "16 rows, 16 experts x 128", partial(
            op_inputs_fp8.moe_fp8, num_rows=16, num_experts=16, width=128, hidden=512)),
    )  # fmt: skip
    return tuple(OpCell(op, size, make, need) for op, size, make in cells)
