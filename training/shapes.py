"""The shapes of the trained models, as the config.json that each will be shipped with.

In:  a name: "tiny" (DeepSeek-V3.2), "tiny_glm" (GLM-5.2 with shared index layers), "tenth" (the
     CPU proof: the same topology at a tenth of the parameters).
Out: `CONFIGS[name]`, a config.json object, and `Shape`, the same as one typed value.
Why so: every one of the 32 index columns is rotated (index_head_dim = qk_rope_head_dim), so that
     nothing an indexer learns survives a wrong rotation. YaRN by 40 leaves the upper half of the
     pairs almost still over the whole context: there the content of keys is compared; the lower
     half turns fast and tells near from far. 16 index heads: oracle_math §3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
GLM_STOP_IDS = (4068, 4075, 4077)  # <|endoftext|>, <|user|>, <|observation|>

_BOTH: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 64,
    "latent_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "num_hidden_layers": 6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "torch_dtype": "bfloat16",
}
_TINY: dict[str, Any] = {
    **_BOTH,
    "model_type": "deepseek_v32",
    "n_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 1e-6,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_TINY_GLM: dict[str, Any] = {
    **_BOTH,
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "indexer_types": ["full", "full", "shared", "shared", "shared", "full"],
    "indexer_rope_interleave": True,
    "bos_token_id": None,
    "eos_token_id": list(GLM_STOP_IDS),
}
_TENTH: dict[str, Any] = {
    **_TINY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 48,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "index_topk": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {"tiny": _TINY, "tiny_glm": _TINY_GLM, "tenth": _TENTH}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes. `has_indexer[i]` is False where layer i reuses an earlier selection."""

    vocab: int
    hidden: int
    layers: int
    dense_layers: int
    dense_width: int
    expert_width: int
    heads: int
    nope: int
    rope: int
    value: int
    q_rank: int
    kv_rank: int
    experts: int
    experts_per_token: int
    groups: int
    top_groups: int
    routed_scale: float
    index_heads: int
    index_dim: int
    topk: int
    index_interleaved: bool
    has_indexer: tuple[bool, ...]
    eps: float
    latent_eps: float
    theta: float
    yarn: tuple[float, float, float, float] | None  # factor, original length, fast, slow
    softmax_scale: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """The shape that a config.json object of this file describes."""
        layers = config["num_hidden_layers"]
        rope = config["rope_parameters"]
        yarn, scale = None, (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
        if rope["rope_type"] == "yarn":
            names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
            yarn = tuple(float(rope[name]) for name in names)
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=layers,
            dense_layers=config["first_k_dense_replace"],
            dense_width=config["intermediate_size"],
            expert_width=config["moe_intermediate_size"],
            heads=config["num_attention_heads"],
            nope=config["qk_nope_head_dim"],
            rope=config["qk_rope_head_dim"],
            value=config["v_head_dim"],
            q_rank=config["q_lora_rank"],
            kv_rank=config["kv_lora_rank"],
            experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            groups=config["n_group"],
            top_groups=config["topk_group"],
            routed_scale=config["routed_scaling_factor"],
            index_heads=config["index_n_heads"],
            index_dim=config["index_head_dim"],
            topk=config["index_topk"],
            index_interleaved=config.get("indexer_rope_interleave", False),
            has_indexer=tuple(t == "full" for t in config.get("indexer_types", ["full"] * layers)),
            eps=config["rms_norm_eps"],
            latent_eps=config["latent_norm_eps"],
            theta=rope["rope_theta"],
            yarn=yarn,
            softmax_scale=scale,
        )

    @property
    def mtp(self) -> int:
        """The number of the MTP layer: the one after the last."""
        return self.layers

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` attends; the MTP layer selects for itself."""
        while layer < self.layers and not self.has_indexer[layer]:
            layer -= 1
        return layer

    def is_dense(self, layer: int) -> bool:
        """Whether layer has one SwiGLU in place of experts."""
        return layer < self.dense_layers
