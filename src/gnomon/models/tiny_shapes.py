"""The default shapes of random models: small, and with every feature of their family switched on.

In:  a family.
Out: the JSON object of its config.json (oracle_math §3.1, whose runs these shapes are from).
     16 index heads, not fewer: with few heads all scores of a pair may be cut to 0 by the relu,
     and the selection then hangs on ties (§3.3).
Not here: weights (random_model), the syntax of random: specs (model_spec).
"""

from __future__ import annotations

from gnomon.models.config import Family

SHARED: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 2,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": None,
    "bos_token_id": None,
}
DEEPSEEK: dict[str, object] = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 6,
    "n_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GLM: dict[str, object] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 8,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
}


def tiny_shape(family: Family) -> dict[str, object]:
    """A fresh config.json object of the family's tiny shape."""
    own = {Family.DEEPSEEK_V32: DEEPSEEK, Family.GLM_MOE_DSA: GLM}[family]
    nested = own["rope_parameters"]
    assert isinstance(nested, dict)
    return {**SHARED, **own, "rope_parameters": dict(nested)}
