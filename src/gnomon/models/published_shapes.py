"""Shapes of published models, for plans and benchmarks that need no download.

In:  a name, "deepseek-v3.2". Out: a fresh config.json object (values: oracle_math.md §2.1).
Not here: weights, tokenizers; tiny shapes for tests (tiny_shapes.py).
"""

from __future__ import annotations

import copy

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
COMMON: dict[str, object] = {
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "index_head_dim": 128,
    "index_topk": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V32: dict[str, object] = {
    "model_type": "deepseek_v32",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18432,
    "n_group": 8,
    "topk_group": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "index_n_heads": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {**FP8, "scale_fmt": "ue8m0"},
}
GLM_5: dict[str, object] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "q_lora_rank": 2048,
    "intermediate_size": 12288,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "quantization_config": FP8,
}
GLM_52: dict[str, object] = {
    **GLM_5,
    "max_position_embeddings": 1048576,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
}
PUBLISHED = {
    "deepseek-v3.2": DEEPSEEK_V32,
    "glm-5": GLM_5,
    "glm-5.1": GLM_5,  # another training of the same shape
    "glm-5.2": GLM_52,
}


def published_shape(name: str) -> dict[str, object] | None:
    """The config of a published model; None for another name."""
    found = PUBLISHED.get(name.lower())
    return None if found is None else copy.deepcopy({**COMMON, **found})
