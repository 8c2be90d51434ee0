"""Shapes of the models that speed is measured on: layers of published models, a few of each.

In:  a name. Out: the family and config fields of `random:NAME` (reference/vllm_e2e_anchor.md §2).
h128: one GPU of attention-DP and expert-parallel 8 of DeepSeek-V3.2. h16tp8: one rank of tensor
parallel 8 of it, without its collectives. glm: GLM-5's widths. Each has 6 layers, the first dense,
block FP8 weights, an indexer in every layer, contexts up to 65,536.
Not here: weights (random_model), whole published models (published_shapes).
"""

from __future__ import annotations

import copy

from gnomon.models.config import Family
from gnomon.models.published_shapes import COMMON, DEEPSEEK_V32, FP8, GLM_5

CUT: dict[str, object] = {
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "max_position_embeddings": 65536,
    "quantization_config": FP8,
    "eos_token_id": None,
}
H128: dict[str, object] = {**COMMON, **DEEPSEEK_V32, **CUT}
H16TP8: dict[str, object] = {
    **H128,
    "num_attention_heads": 16,
    "n_routed_experts": 256,
    "moe_intermediate_size": 256,
    "intermediate_size": 2304,
    "vocab_size": 16160,
}
GLM: dict[str, object] = {**COMMON, **GLM_5, **CUT}
ANCHORS = {
    "h128": (Family.DEEPSEEK_V32, H128),
    "h16tp8": (Family.DEEPSEEK_V32, H16TP8),
    "glm": (Family.GLM_MOE_DSA, GLM),
}


def anchor_shape(name: str) -> tuple[Family, dict[str, object]] | None:
    """The family, and a fresh config.json object; None for another name."""
    if name not in ANCHORS:
        return None
    family, fields = ANCHORS[name]
    return family, copy.deepcopy(fields)
