"""Every name that may stand in a config.json, and what gnomon does with it.

In:  nothing, and the names of a file for `refuse_unknown_fields`.
Out: `HONOURED` (changes what is computed), `CHECKED` (has one allowed value, which the code
     implements, or must agree with honoured fields), `UNUSED` (says nothing about inference).
     A name that is on no list is refused if it looks like a part of the maths, else logged.
Not here: values (config_reading).
"""

from __future__ import annotations

import logging

from gnomon.models.config_fields import Fields

logger = logging.getLogger(__name__)

HONOURED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
    "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace",
    "mlp_layer_types", "rms_norm_eps", "latent_norm_eps", "index_n_heads", "index_head_dim",
    "index_topk", "indexer_rope_interleave", "indexer_types", "index_topk_pattern",
    "index_topk_freq", "index_skip_topk_offset", "index_hadamard", "rope_theta", "rope_scaling",
    "rope_parameters", "max_position_embeddings", "tie_word_embeddings",
    "num_nextn_predict_layers", "quantization_config", "torch_dtype", "dtype", "eos_token_id",
    "bos_token_id",
)  # fmt: skip
CHECKED = (
    "model_type", "architectures", "layer_types", "num_key_value_heads", "qk_head_dim",
    "num_experts", "num_local_experts", "hidden_act", "attention_bias", "mlp_bias",
    "scoring_func", "topk_method", "moe_layer_freq", "rope_interleave", "partial_rotary_factor",
    "moe_router_dtype", "compression_config",
)  # fmt: skip
# head_dim stands for several things in published files and is wrong in some (oracle_math §2.1).
UNUSED = (
    "head_dim", "attention_dropout", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp",
    "initializer_range", "use_cache", "pad_token_id", "transformers_version", "auto_map",
    "index_share_for_mtp_iteration", "router_aux_loss_coef", "output_router_logits",
    "_name_or_path", "id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder",
    "output_attentions", "output_hidden_states", "return_dict", "problem_type", "unsloth_fixed",
    "name_or_path", "task_specific_params", "_attn_implementation", "attn_implementation",
)  # fmt: skip
# What a field that changes attention, rotation, routing or the residual stream begins with.
MATHS_PREFIXES = (
    "index", "rope", "rotary", "yarn", "attn_", "attention_", "sliding", "window", "linear_",
    "mla_", "hc_", "mhc", "compress", "moe_", "expert", "router", "swiglu", "logit", "final_",
    "residual", "embedding_", "scale_", "qk_", "kv_", "q_",
)  # fmt: skip


def refuse_unknown_fields(fields: Fields) -> None:
    """Refuse unknown fields of the maths that are switched on; log the other unknown ones."""
    known = {*HONOURED, *CHECKED, *UNUSED}
    for name, value in fields.values.items():
        if name in known or value is None or value is False:
            continue
        if name.startswith(MATHS_PREFIXES):
            remedy = "gnomon does not implement it; the answers would be wrong without it."
            raise fields.error(name, "null or false", remedy)
        logger.info("%s: field '%s' is not used", fields.source, name)
