"""What a config.json may not say: every refusal names the field, the value and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.errors import ConfigError
from gnomon.models.config import Family
from gnomon.models.config_reading import SIZES, read_config
from gnomon.models.tiny_shapes import tiny_shape

DEEPSEEK = Family.DEEPSEEK_V32
GLM = Family.GLM_MOE_DSA


def refusal(family: Family, **fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(tiny_shape(family) | fields)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [*SIZES, "vocab_size", "num_hidden_layers", "n_routed_experts", "rms_norm_eps", "model_type"],
)
def test_missing_sizes_are_not_guessed(name: str) -> None:
    shape = tiny_shape(DEEPSEEK)
    del shape[name]
    with pytest.raises(ConfigError, match=f"'{name}' is missing"):
        read_config(shape)


def test_missing_theta_is_not_guessed() -> None:
    assert "'rope_theta' is missing" in refusal(GLM, rope_parameters=None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_topk", 0),
        ("index_topk", -1),
        ("index_topk", 16.0),
        ("index_topk", True),
        ("index_topk", "16"),
        ("hidden_size", 2**31),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("norm_topk_prob", 1),
        ("tie_word_embeddings", "no"),
        ("torch_dtype", "int8"),
        ("eos_token_id", 512),
        ("eos_token_id", [1, -1]),
        ("eos_token_id", "</s>"),
        ("bos_token_id", [0, 1]),
        ("mlp_layer_types", ["dense"] * 5),
        ("mlp_layer_types", ["dense"] * 5 + ["thin"]),
        ("mlp_layer_types", "dense"),
        ("layer_types", ["full_attention"] * 6),
        ("indexer_types", ["full"] * 4),
        ("indexer_types", ["shared"] + ["full"] * 5),
        ("rope_parameters", "yarn"),
        ("quantization_config", "fp8"),
    ],
)
def test_values_out_of_range(field: str, value: object) -> None:
    message = refusal(DEEPSEEK, **{field: value})
    assert f"'{field}' is " in message
    assert "allowed: " in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_group": 3}, "n_group"),
        ({"n_group": 16, "topk_group": 8}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ({"index_head_dim": 8}, "index_head_dim"),
        ({"index_head_dim": 48, "index_hadamard": True}, "index_hadamard"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"qk_head_dim": 64}, "qk_head_dim"),
        ({"num_experts": 8}, "num_experts"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "torch_dtype"),
        ({"rope_theta": 5e5}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 8}}, "rope_parameters"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architectures"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, object], named: str) -> None:
    assert f"'{named}' is " in refusal(DEEPSEEK, **fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("rope_interleave", False),
        ("moe_router_dtype", "bfloat16"),
        ("partial_rotary_factor", 0.5),
        ("index_kpool", 4),
        ("mla_use_nope", True),
        ("swiglu_limit", 10.0),
        ("sliding_window", 4096),
        ("indexer_rope_theta", 1e6),
    ],
)
def test_maths_that_is_not_implemented_is_never_ignored(field: str, value: object) -> None:
    assert f"'{field}' is {value!r}" in refusal(GLM, **{field: value})


def test_unknown_fields_that_are_off_or_harmless_pass() -> None:
    shape = tiny_shape(GLM)
    extra = {"sliding_window": None, "qk_layernorm": False, "aux_loss_alpha": 0.1, "colour": "red"}
    assert read_config(shape | extra) == read_config(shape)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "llama3", "rope_theta": 1e4}, "rope_type"),
        ({"rope_type": "yarn", "type": "default", "rope_theta": 1e4}, "type"),
        ({"rope_type": "default", "rope_theta": 1e4, "factor": 4}, "factor"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.5}, "factor"),
        ({"rope_type": "default", "rope_theta": 1e4, "short_factor": [1]}, "short_factor"),
        ({"rope_type": "default", "rope_theta": 1.0}, "rope_theta"),
    ],
)
def test_rotary_fields(rope: dict[str, object], named: str) -> None:
    assert f"'{named}' is" in refusal(GLM, rope_parameters=rope)


@pytest.mark.parametrize("pattern", ["FFSX", "SFFFFFFF", "FFFF", ["F"] * 8])
def test_sharing_patterns(pattern: object) -> None:
    assert "'index_topk_pattern' is" in refusal(GLM, index_topk_pattern=pattern)


def test_sharing_belongs_to_glm() -> None:
    message = refusal(DEEPSEEK, index_topk_pattern="FFFSSS")
    assert "every layer has an indexer" in message


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("deepseek_v3", "has no indexer"),
        ("deepseek_v4", "not built yet"),
        ("glm5_next", "not built yet"),
        ("llama", "deepseek_v32 or glm_moe_dsa"),
        (["deepseek_v32"], "deepseek_v32 or glm_moe_dsa"),
    ],
)
def test_other_models_are_refused_by_name(model_type: object, says: str) -> None:
    assert says in refusal(DEEPSEEK, model_type=model_type)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"weight_block_size": [128, 128]}, "quant_method"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        (
            {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"},
            "activation_scheme",
        ),
        ({"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e5m2"}, "fmt"),
    ],
)
def test_quantisation_that_is_not_read(quantization: dict[str, object], named: str) -> None:
    message = refusal(DEEPSEEK, quantization_config=quantization)
    assert named in message
    assert "quantization_config" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is not there"),
        ("{", "not valid JSON"),
        ("[1]", "a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_files_that_are_no_config(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_config(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(json.dumps(tiny_shape(GLM)).encode() + b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_config(tmp_path)
