"""Read the config.json of a DeepSeek-V3.2 or GLM-5 checkpoint to a `ModelConfig`.

In:  a model folder, or the JSON object itself; overrides by field name, which win.
Out: a complete `ModelConfig`. Sizes have to be there; the rest has its family's default (§2.1).
     `ConfigError` names the field, its value, what is allowed and a remedy.
Maths and defaults: oracle_math §1.3–1.8, §2.1.
Not here: weights, tokenizer, generation_config.json.

`latent_norm_eps`, of the q_a and kv_a norms, is not a published field. Default: 1e-6 for DeepSeek;
for GLM `rms_norm_eps` (1e-5), as SGLang and vLLM do. transformers uses 1e-6 for GLM: to compare
with it, override latent_norm_eps=1e-6. `index_hadamard` is not a published field either; it is off
because in fp32 and bf16 it only costs time (it pays where index keys are kept in FP8).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from gnomon.models.config import Family, ModelConfig
from gnomon.models.config_agreement import check_agreement, read_quantization
from gnomon.models.config_fields import Fields, read_json_object
from gnomon.models.config_layers import check_layer_types, read_indexer_types, read_mlp_types
from gnomon.models.config_names import refuse_unknown_fields
from gnomon.models.config_overrides import apply_override
from gnomon.models.config_rope import read_rope

ARCHITECTURES = {
    Family.DEEPSEEK_V32: "DeepseekV32ForCausalLM",
    Family.GLM_MOE_DSA: "GlmMoeDsaForCausalLM",
}
NEIGHBOURS = {
    "deepseek_v2": "it has no indexer; serve it with an engine for dense MLA",
    "deepseek_v3": "it has no indexer; serve it with an engine for dense MLA",
    "kimi_k2": "it has no indexer; serve it with an engine for dense MLA",
    "deepseek_v4": "this family is designed for but not built yet",
    "glm5_next": "this family is designed for but not built yet",
}
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
NEEDS_FILES = (
    "A model folder holds config.json, *.safetensors (with model.safetensors.index.json if there "
    "is more than one), tokenizer.json and generation_config.json, as on the hub."
)
LATENT_EPS = 1e-6
# Without these there is no shape; a default would be another model's.
SIZES = (
    "hidden_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "q_lora_rank", "kv_lora_rank", "intermediate_size", "moe_intermediate_size",
    "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_topk",
    "max_position_embeddings",
)  # fmt: skip


def read_config(
    source: Path | str | Mapping[str, object], overrides: Mapping[str, object] | None = None
) -> ModelConfig:
    """The config of a folder or object. Overrides reach into nested ones by a dot."""
    if isinstance(source, Mapping):
        values, name = dict(source), "config"
    else:
        path = Path(source) / "config.json"
        values, name = read_json_object(path, NEEDS_FILES), str(path)
    for key, value in (overrides or {}).items():
        apply_override(values, key, value)
    fields = Fields(values, name)
    family = _read_family(fields)
    refuse_unknown_fields(fields)
    _check_one_way_fields(fields)
    config = _assemble(fields, family)
    check_agreement(fields, config)
    return config


def _read_family(fields: Fields) -> Family:
    """The family, by name and never by guess; architectures must not say another thing."""
    name = fields.values.get("model_type")
    supported = " or ".join(Family)
    if not isinstance(name, str) or name not in list(Family):
        reason = NEIGHBOURS.get(name, "") if isinstance(name, str) else ""
        remedy = f"gnomon does not serve {name!r}: {reason}." if reason else "Use such a model."
        raise fields.error("model_type", supported, remedy)
    family = Family(name)
    listed = fields.words("architectures")
    if listed and ARCHITECTURES[family] not in listed:
        remedy = f"It contradicts model_type '{name}'."
        raise fields.error("architectures", f"[{ARCHITECTURES[family]!r}]", remedy)
    return family


def _check_one_way_fields(fields: Fields) -> None:
    """Fields with one implemented value: any other one would be ignored, so it is refused."""
    fields.require("hidden_act", ("silu",), "The gate of every expert is a SiLU")
    for bias in ("attention_bias", "mlp_bias"):
        fields.require(bias, (False,), "No released model has such biases")
    fields.require("scoring_func", ("sigmoid",), "Experts are scored by a sigmoid")
    method = "Experts are chosen by score plus correction bias"
    fields.require("topk_method", ("noaux_tc",), method)
    fields.require("moe_layer_freq", (1,), "Use mlp_layer_types to mix dense layers in")
    fields.require("rope_interleave", (True,), "Both families rotate neighbouring pairs")
    fields.require("moe_router_dtype", ("float32", "fp32"), "The router always runs in float32")


def _assemble(fields: Fields, family: Family) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers")
    num_extra = fields.integer("num_nextn_predict_layers", minimum=0, default=0)
    check_layer_types(fields, num_layers, num_extra)
    is_glm = family is Family.GLM_MOE_DSA
    eps = fields.number("rms_norm_eps")
    vocab = fields.integer("vocab_size")
    bos = _token_ids(fields, "bos_token_id", vocab, default=0)
    if len(bos) > 1:
        raise fields.error("bos_token_id", "one token id, or null")
    return ModelConfig(
        **{name: fields.integer(name) for name in SIZES},
        model_type=family,
        vocab_size=vocab,
        num_hidden_layers=num_layers,
        n_routed_experts=_num_experts(fields),
        n_shared_experts=fields.integer("n_shared_experts", default=1),
        n_group=fields.integer("n_group", default=1 if is_glm else 8),
        topk_group=fields.integer("topk_group", default=1 if is_glm else 4),
        routed_scaling_factor=fields.number("routed_scaling_factor", default=2.5),
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        first_k_dense_replace=fields.integer("first_k_dense_replace", minimum=0, default=3),
        mlp_layer_types=read_mlp_types(fields, num_layers, num_extra),
        rms_norm_eps=eps,
        latent_norm_eps=fields.number("latent_norm_eps", default=eps if is_glm else LATENT_EPS),
        indexer_rope_interleave=fields.flag("indexer_rope_interleave", default=is_glm),
        indexer_types=read_indexer_types(fields, family, num_layers, num_extra),
        index_hadamard=fields.flag("index_hadamard", default=False),
        rope=read_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        num_nextn_predict_layers=num_extra,
        quantization=read_quantization(fields),
        torch_dtype=_dtype(fields),
        eos_token_ids=_token_ids(fields, "eos_token_id", vocab, default=1),
        bos_token_id=bos[0] if bos else None,
    )


def _token_ids(fields: Fields, name: str, vocab: int, default: int) -> tuple[int, ...]:
    """The ids of a field; null means none, and an absent field what transformers assumes."""
    if name not in fields.values:
        return (default,) if default < vocab else ()
    return fields.integers(name, below=vocab)


def _num_experts(fields: Fields) -> int:
    """`n_routed_experts`, or one of the names that transformers accepts for it."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    given = [name for name in names if fields.has(name)]
    counts = [fields.integer(name) for name in given]
    for name, count in zip(given, counts, strict=True):
        if count != counts[0]:
            raise fields.error(name, f"{counts[0]}, as '{given[0]}' says", "Keep one of the two.")
    return counts[0] if counts else fields.integer("n_routed_experts")


def _dtype(fields: Fields) -> torch.dtype:
    """The dtype that the checkpoint was made in; bfloat16 where nothing is said."""
    words = tuple(DTYPES)
    old = fields.word("torch_dtype", words, default="bfloat16")
    new = fields.word("dtype", words, default=old)
    if fields.has("torch_dtype") and new != old:
        raise fields.error("torch_dtype", f"{new!r}, as 'dtype' says", "Keep one of the two.")
    return DTYPES[new]
