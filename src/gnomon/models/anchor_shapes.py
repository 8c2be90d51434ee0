"""Shapes of the models that speed is measured on: layers of published models, a few of each.

In:  a name. Out: the family and config fields of `random:NAME` (reference/vllm_e2e_anchor.md §2).
h128: one GPU of attention-DP and expert-parallel 8 of DeepSeek-V3.2; glm: the same of GLM-5. What
ends in tpN is one rank of tensor parallel N, without its collectives: h32tp4, h16tp8 of V3.2,
glm_h16tp4, glm_h8tp8 of GLM-5; heads, all widths of feed-forwards and the vocabulary are divided,
the indexer and the latents are whole. Each has 6 layers, the first dense, block FP8 weights, an
indexer in every layer, contexts up to 65,536.
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
GLM: dict[str, object] = {**COMMON, **GLM_5, **CUT}
DIVIDED = ("num_attention_heads", "moe_intermediate_size", "intermediate_size", "vocab_size")


def _rank(whole: dict[str, object], num_ranks: int) -> dict[str, object]:
    """One rank of tensor parallel: every expert, cut as the dense layers are."""
    parts = {name: int(str(whole[name])) // num_ranks for name in DIVIDED}
    return {**whole, "n_routed_experts": COMMON["n_routed_experts"], **parts}


ANCHORS = {
    "h128": (Family.DEEPSEEK_V32, H128),
    "h32tp4": (Family.DEEPSEEK_V32, _rank(H128, 4)),
    "h16tp8": (Family.DEEPSEEK_V32, _rank(H128, 8)),
    "glm": (Family.GLM_MOE_DSA, GLM),
    "glm_h16tp4": (Family.GLM_MOE_DSA, _rank(GLM, 4)),
    "glm_h8tp8": (Family.GLM_MOE_DSA, _rank(GLM, 8)),
}


def anchor_shape(name: str) -> tuple[Family, dict[str, object]] | None:
    """The family, and a fresh config.json object; None for another name."""
    if name not in ANCHORS:
        return None
    family, fields = ANCHORS[name]
    return family, copy.deepcopy(fields)
