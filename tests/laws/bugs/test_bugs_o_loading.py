"""Cases O of reference/bugs.md: loading checkpoints and configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gnomon.errors import CheckpointError, ConfigError
from gnomon.models.config import BlockFp8, Family
from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.load_plan import extras_summary
from gnomon.models.loading import load_model_params
from gnomon.models.params import param_specs
from gnomon.models.random_model import random_params
from gnomon.models.sources import open_model, parse_model_spec
from tests.unit.models.checkpoint_folders import (
    assemble,
    hub_shapes,
    small_shape,
    stored_tensors,
    tiny_config,
    write_folder,
)

BLOCK = BlockFp8(128, 128, False, ())
SHARED = {"indexer_types": ["full", "shared", "full"]}


def test_o1_fp8_and_bf16_load_with_each_projection_of_its_own(tmp_path: Path) -> None:
    """Scales of `wk` and `weights_proj`, which engines fuse, are found under their own names."""
    config = tiny_config()
    params = random_params(config, 1, torch.float32)
    save_checkpoint(tmp_path / "fp8", config, params, fp8=BLOCK)
    save_checkpoint(tmp_path / "bf16", config, params, dtype=torch.bfloat16)
    for name, bound in (("fp8", 2.0**-4), ("bf16", 2.0**-8)):
        folder = tmp_path / name
        loaded = load_model_params(folder, read_config(folder), torch.float32)
        assert loaded.keys() == params.keys()
        for key, value in params.items():
            close = (
                loaded[key] - value
            ).abs() <= bound * value.abs() + bound * value.abs().amax() / 4
            assert bool(close.all()), key


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "bitsandbytes"])
def test_o1_packed_four_bit_formats_are_refused_by_name(method: str) -> None:
    quantised = small_shape(quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ConfigError, match=f"'quant_method' is '{method}'; allowed: 'fp8'"):
        read_config(quantised)


@pytest.mark.parametrize("has_extras", [False, True])
def test_o2_index_weights_of_layers_that_skip_them(tmp_path: Path, has_extras: bool) -> None:
    """A checkpoint with index weights of shared layers loads as one without, and says so."""
    shape = small_shape(Family.GLM_MOE_DSA, **SHARED)
    config = read_config(shape)
    tensors = stored_tensors(config)
    whole = hub_shapes(tiny_config(Family.GLM_MOE_DSA, indexer_types=["full"] * 3))
    extras = {k: torch.ones(s) for k, s in whole.items() if k not in tensors}
    assert len(extras) == 5
    folder = write_folder(tmp_path / "m", shape, tensors | (extras if has_extras else {}))
    loaded = open_model(folder, torch.float32)
    assert [extra.key for extra in loaded.extras] == (sorted(extras) if has_extras else [])
    lines = extras_summary(loaded.extras)
    assert all("shares another layer's selection" in line for line in lines)
    expected = assemble(config, tensors)
    got = load_model_params(folder, config, torch.float32)
    assert all(torch.equal(got[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    "renamed",
    ["{}_packed", "{}_scale", "model.layers.1.self_attn.fused_qkv_a.weight"],
    ids=["packed", "lone scale", "fused"],
)
def test_o3_a_projection_under_another_name_is_fatal(tmp_path: Path, renamed: str) -> None:
    """Not a warning: both the tensor that is missing and the one that nobody takes are named."""
    shape = small_shape()
    tensors = stored_tensors(read_config(shape))
    key = "model.layers.1.self_attn.q_a_proj.weight"
    name = renamed.format(key)
    tensors[name] = tensors.pop(key)
    with pytest.raises(CheckpointError) as refusal:
        open_model(write_folder(tmp_path / "m", shape, tensors))
    assert f"{key}: expected shape" in str(refusal.value)
    assert f"{name}: expected no such tensor" in str(refusal.value)


def test_o4_a_model_is_what_its_config_says_not_what_its_shape_suggests(tmp_path: Path) -> None:
    """61 layers do not make a V3.2 of a V4, nor a V4 of a V3.2; errors name the file."""
    tensors = stored_tensors(tiny_config())
    folder = write_folder(tmp_path / "m", small_shape() | {"model_type": "deepseek_v4"}, tensors)
    with pytest.raises(ConfigError, match=r"config\.json: field 'model_type' is 'deepseek_v4'"):
        parse_model_spec(folder)
    mixed = small_shape() | {"architectures": ["GlmMoeDsaForCausalLM"]}
    folder = write_folder(tmp_path / "n", mixed, tensors)
    with pytest.raises(ConfigError, match="contradicts model_type 'deepseek_v32'"):
        parse_model_spec(folder)
    folder = write_folder(tmp_path / "o", small_shape(), tensors)
    source, again = parse_model_spec(folder), parse_model_spec(folder)
    assert source.config == again.config
    revisions = {
        open_model(parse_model_spec(folder, overrides=change)).revision
        for change in ({}, {"index_topk": 4}, {"indexer_rope_interleave": True})
    }
    assert len(revisions) == 3  # the config as used is part of the name of every cached page


def test_o5_no_parameter_is_made_that_no_checkpoint_holds(tmp_path: Path) -> None:
    """Every parameter has its stored tensors; a gate bias that is left out is asked for by name."""
    config = tiny_config()
    sources = {source.key for spec in param_specs(config) for source in spec.sources}
    assert sources == set(hub_shapes(config))
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors = {k: v for k, v in stored_tensors(config).items() if k != bias}
    with pytest.raises(CheckpointError, match=rf"{bias}: expected shape \[4\], found nothing"):
        open_model(write_folder(tmp_path / "m", small_shape(), tensors))
