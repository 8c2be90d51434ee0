"""A `ModelConfig` back to the JSON object of a config.json.

In:  a config; optionally the dtype and quantisation that the weights are stored in.
Out: an object that `read_config` turns into the same config, and that transformers understands.
Not here: files (export).
"""

from __future__ import annotations

import dataclasses

import torch

from gnomon.models.config import BlockFp8, ModelConfig, RopeConfig
from gnomon.models.config_reading import ARCHITECTURES, DTYPES

# Fields that are spelt otherwise in a file than in ModelConfig.
RESPELT = ("rope", "quantization", "torch_dtype", "eos_token_ids", "indexer_types")


def config_to_json(
    config: ModelConfig, *, dtype: torch.dtype | None = None, fp8: BlockFp8 | None = None
) -> dict[str, object]:
    """The config.json of a model whose weights are stored in `dtype`, or in block FP8."""
    values: dict[str, object] = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in RESPELT
    }
    values["model_type"] = str(config.model_type)
    values["architectures"] = [ARCHITECTURES[config.model_type]]
    values["num_key_value_heads"] = config.num_attention_heads
    values["mlp_layer_types"] = list(config.mlp_layer_types)
    values["indexer_types"] = list(config.indexer_types)
    values["rope_parameters"] = _rope_to_json(config.rope)
    stored = dtype or config.torch_dtype
    values["torch_dtype"] = next(name for name, known in DTYPES.items() if known is stored)
    eos = config.eos_token_ids
    values["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    if fp8 is not None:
        values["quantization_config"] = _quantization_to_json(fp8)
    return values


def _rope_to_json(rope: RopeConfig) -> dict[str, object]:
    if rope.yarn is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {"rope_type": "yarn", "rope_theta": rope.theta, **dataclasses.asdict(rope.yarn)}


def _quantization_to_json(fp8: BlockFp8) -> dict[str, object]:
    values: dict[str, object] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8.block_rows, fp8.block_columns],
        "modules_to_not_convert": list(fp8.kept_modules),
    }
    if fp8.has_power_of_two_scales:
        values["scale_fmt"] = "ue8m0"
    return values
