"""transformers = gnomon for folders, in the forms in which checkpoints come.

A folder that transformers wrote is read by both as it is: config.json in transformers' own words,
random weights that gnomon did not draw. A folder in the published FP8 block format is dequantised
by gnomon, and transformers gets what gnomon read (its own dequantiser is broken, oracle_math.md
§3.6 item 1); that these are the right numbers is for tests/unit/models. A folder with DeepSeek's
spelling of the rotary fields; one in shards, one with bfloat16 weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from gnomon.models.config import BlockFp8, Family
from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.random_model import random_params
from gnomon.models.tiny_shapes import tiny_shape
from gnomon.verify.context import Context
from gnomon.verify.laws import choose_laws
from gnomon.verify.result import Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

LAWS = "transformers_logits,transformers_choices,transformers_tokens"
CLASSES = {
    Family.DEEPSEEK_V32: (DeepseekV32Config, DeepseekV32ForCausalLM),
    Family.GLM_MOE_DSA: (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}


def check(folder: Path, **flags: Any) -> None:
    settings = VerifySettings.of(
        model=str(folder), prompts=5, max_tokens=4, max_length=140, seed=3, **flags
    )
    context = Context(settings)
    for law in choose_laws(LAWS):
        result = run_law(law, context)
        assert result.verdict is Verdict.PASS, result.failures
        assert result.cases == 5


def save_by_transformers(family: Family, folder: Path, **fields: Any) -> None:
    """A model of transformers whose every tensor is drawn here, at scales that keep logits sane."""
    shape = tiny_shape(family) | {"num_key_value_heads": 4, **fields}
    del shape["model_type"], shape["torch_dtype"]
    make_config, make_model = CLASSES[family]
    model = make_model(make_config(**shape))
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm.weight" in name or "layernorm.weight" in name:
            tensor.copy_(1 + 0.1 * noise)
        elif tensor.dim() == 1:
            tensor.copy_(0.05 * noise)
        else:
            tensor.copy_(noise * (1.0 if "embed" in name else tensor.shape[-1] ** -0.5))
    model.save_pretrained(folder)


@pytest.mark.parametrize("family", list(Family))
def test_written_by_transformers(family: Family, tmp_path: Path) -> None:
    save_by_transformers(family, tmp_path, num_hidden_layers=4)
    check(tmp_path)


def test_tied_head_written_by_transformers(tmp_path: Path) -> None:
    save_by_transformers(
        Family.DEEPSEEK_V32, tmp_path, num_hidden_layers=3, tie_word_embeddings=True
    )
    check(tmp_path)


def test_rotary_fields_as_deepseek_spells_them(tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top level, with type, mscale and mscale_all_dim."""
    save_by_transformers(Family.DEEPSEEK_V32, tmp_path, num_hidden_layers=3)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    assert values["rope_scaling"]["mscale_all_dim"] == 1.0
    path.write_text(json.dumps(values))
    check(tmp_path)


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("is_ue8m0", [True, False])
def test_block_fp8(family: Family, is_ue8m0: bool, tmp_path: Path) -> None:
    """Blocks of 32 x 48, so that edges are cut off in both directions."""
    config = read_config(tiny_shape(family) | {"num_hidden_layers": 3, "indexer_types": None})
    params = random_params(config, 0, torch.bfloat16)
    save_checkpoint(tmp_path, config, params, shards=2, fp8=BlockFp8(32, 48, is_ue8m0, ()))
    check(tmp_path)


def test_bfloat16_weights_in_shards(tmp_path: Path) -> None:
    config = read_config(tiny_shape(Family.GLM_MOE_DSA) | {"num_hidden_layers": 6})
    params = random_params(config, 0, torch.bfloat16)
    save_checkpoint(tmp_path, config, params, shards=3, stacked=True)
    check(tmp_path)


def test_overridden_fields(tmp_path: Path) -> None:
    """The oracle does not see overrides in the folder, so it gets a copy that has them."""
    save_by_transformers(Family.DEEPSEEK_V32, tmp_path, num_hidden_layers=3)
    check(tmp_path, hf_overrides={"index_topk": 24, "routed_scaling_factor": 1.25})
