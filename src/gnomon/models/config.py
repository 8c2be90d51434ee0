"""What a checkpoint says about its model: one frozen, complete, checked value.

In:  nothing; `config_reading.read_config` makes a `ModelConfig` out of a config.json.
Out: `ModelConfig` with Hugging Face's field names, every default resolved, every per-layer rule
     written out layer by layer; `RopeConfig`, `YarnConfig`, `BlockFp8` for its parts.
Maths: softmax scale and YaRN multipliers, oracle_math §1.4; index sharing, §1.6.
Not here: reading and refusing (config_reading), tensor names (params), tables of cos and sin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch

from gnomon.attention.routes import AttentionDims

IndexerType = Literal["full", "shared"]
MlpType = Literal["dense", "sparse"]


class Family(StrEnum):
    """The model families that are built, by the `model_type` of their config.json."""

    DEEPSEEK_V32 = "deepseek_v32"
    GLM_MOE_DSA = "glm_moe_dsa"


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN stretches `original_max_position_embeddings` by `factor`.

    `attention_factor` multiplies cos and sin (1.0 where mscale equals mscale_all_dim);
    `mscale_all_dim` is for the softmax scale (0.0: no change). `truncate`: the two correction
    dimensions are rounded outwards to whole dimensions, as DeepSeek does.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale_all_dim: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the `qk_rope_head_dim` slice; the indexer turns by the same angles."""

    theta: float
    yarn: YarnConfig | None


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """The published FP8 block format: e4m3 weights, one scale per block of rows × columns.

    `has_power_of_two_scales`: scale_fmt is ue8m0. Which tensors are quantised is told by the dtype
    in the file; `kept_modules` (modules_to_not_convert) is only what the config announces.
    """

    block_rows: int
    block_columns: int
    has_power_of_two_scales: bool
    kept_modules: tuple[str, ...]


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DeepSeek-V3.2 or GLM-5 model. Sizes are counts, eps are added to a mean of squares.

    `rms_norm_eps`: block norms and the final norm. `latent_norm_eps`: q_a and kv_a norms; the
    engines and Hugging Face disagree about it for GLM (config_reading says more).
    `mlp_layer_types[i]`, `indexer_types[i]`: one entry per layer, never shorter or longer.
    `indexer_types[i] == "shared"`: layer i has no index weights and no index cache, and attends
    what `index_source(i)` selected. `index_hadamard` turns index queries and keys by an orthogonal
    matrix: no score changes in exact arithmetic.
    """

    model_type: Family
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int
    kv_lora_rank: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    first_k_dense_replace: int
    mlp_layer_types: tuple[MlpType, ...]
    rms_norm_eps: float
    latent_norm_eps: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool
    indexer_types: tuple[IndexerType, ...]
    index_hadamard: bool
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_nextn_predict_layers: int
    quantization: BlockFp8 | None
    torch_dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head in the un-absorbed form: nope and rope together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are stored as one wide expert."""
        return self.n_shared_experts * self.moe_intermediate_size

    def is_dense_layer(self, layer: int) -> bool:
        """Whether layer has one dense SwiGLU in place of the mixture of experts."""
        return self.mlp_layer_types[layer] == "dense"

    def has_indexer(self, layer: int) -> bool:
        """Whether layer selects for itself (it has index weights and an index cache)."""
        return self.indexer_types[layer] == "full"

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` attends: itself, or the nearest full one before it."""
        while not self.has_indexer(layer):
            layer -= 1  # ends: the reader refuses a model whose layer 0 is shared
        return layer

    def softmax_scale(self) -> float:
        """Factor of the attention logits; index scores do not get the YaRN part."""
        scale = math.pow(self.qk_head_dim, -0.5)
        yarn = self.rope.yarn
        if yarn is None:
            return scale
        return scale * math.pow(yarn_mscale(yarn.factor, yarn.mscale_all_dim), 2)

    def attention_dims(self) -> AttentionDims:
        """The part of the shape that attention operators and the plan need."""
        return AttentionDims(
            num_heads=self.num_attention_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            index_topk=self.index_topk,
            index_num_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
        )
