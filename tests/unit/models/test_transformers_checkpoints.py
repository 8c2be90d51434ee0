"""Folders that transformers wrote, read by gnomon: every tensor equal, in both spellings.

The only test module of the models that imports transformers (it takes seconds to import).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedConfig,
)

from gnomon.models.checkpoint import read_checkpoint
from gnomon.models.config import Family
from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.load_plan import plan_load
from gnomon.models.loading import load_model_params
from gnomon.models.random_model import random_params
from gnomon.models.tiny_shapes import tiny_shape
from tests.unit.models.checkpoint_folders import assemble

CLASSES = {
    Family.DEEPSEEK_V32: (DeepseekV32Config, DeepseekV32ForCausalLM),
    Family.GLM_MOE_DSA: (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}


def make_config(family: Family) -> PreTrainedConfig:
    shape = tiny_shape(family) | {"num_key_value_heads": 4}
    del shape["model_type"], shape["torch_dtype"]
    return CLASSES[family][0](**shape)


def make_model(family: Family) -> torch.nn.Module:
    """A tiny model whose every tensor is random, norms and biases too."""
    torch.manual_seed(0)
    model = CLASSES[family][1](make_config(family))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_()
    return model


def hub_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors under hub names: the stacked experts taken apart by hand."""
    tensors: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        prefix, _, last = key.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}.{expert}.up_proj.weight"] = up
        elif last == "down_proj" and prefix.endswith("experts"):
            for expert, down in enumerate(value):
                tensors[f"{prefix}.{expert}.down_proj.weight"] = down
        else:
            tensors[key] = value
    return tensors


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("as_on_hub", [True, False])
def test_saved_by_transformers(family: Family, as_on_hub: bool, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path, max_shard_size="10MB", save_original_format=as_on_hub)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = read_config(tmp_path)
    params = load_model_params(tmp_path, config, torch.float32)
    expected = assemble(config, hub_tensors(model))
    assert params.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(params[name], values), name
    assert plan_load(read_checkpoint(tmp_path), config).extras == ()


@pytest.mark.parametrize("family", list(Family))
def test_config_means_the_same(family: Family, tmp_path: Path) -> None:
    """The config that transformers wrote reads as the one it was made from."""
    model_config = make_config(family)
    model_config.save_pretrained(tmp_path)
    expected = read_config(tiny_shape(family) | {"torch_dtype": "bfloat16"})
    assert replace(read_config(tmp_path), torch_dtype=torch.bfloat16) == expected
    types = getattr(model_config, "indexer_types", None)
    assert types is None or types == list(expected.indexer_types)


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("stacked", [False, True])
def test_transformers_reads_what_gnomon_writes(
    family: Family, stacked: bool, tmp_path: Path
) -> None:
    config = read_config(tiny_shape(family))
    params = random_params(config, 0, torch.float32)
    save_checkpoint(tmp_path, config, params, shards=2, stacked=stacked)
    _, model_class = CLASSES[family]
    model, report = model_class.from_pretrained(
        tmp_path, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    back = assemble(config, hub_tensors(model))
    assert back.keys() == params.keys()
    for name, values in params.items():
        assert torch.equal(back[name], values), name
    yarn = config.rope.yarn
    attention = model.model.layers[0].self_attn
    assert attention.scaling == pytest.approx(config.softmax_scale(), rel=1e-12)
    assert model.model.rotary_emb.attention_scaling == (yarn.attention_factor if yarn else 1.0)
