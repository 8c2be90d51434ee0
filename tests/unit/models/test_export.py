"""The exporter writes what the loader reads: same config, same parameters to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gnomon.errors import ConfigError
from gnomon.models.config import BlockFp8, Family
from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.loading import load_model_params
from gnomon.models.quantised import dequantise_blocks, quantise_blocks
from gnomon.models.random_model import random_params
from tests.unit.models.checkpoint_folders import hub_shapes, tiny_config


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shards", "stacked"), [(1, False), (1, True), (4, False), (4, True)])
def test_round_trip(
    family: Family, dtype: torch.dtype, shards: int, stacked: bool, tmp_path: Path
) -> None:
    config = (
        tiny_config(family, index_topk_freq=2, index_skip_topk_offset=1)
        if (family is Family.GLM_MOE_DSA)
        else tiny_config(family)
    )
    params = random_params(config, 2, dtype)
    save_checkpoint(tmp_path, config, params, shards=shards, stacked=stacked)
    assert read_config(tmp_path) == replace(config, torch_dtype=dtype)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    back = load_model_params(tmp_path, config, dtype)
    assert back.keys() == params.keys()
    for name, values in params.items():
        assert back[name].dtype is values.dtype
        assert torch.equal(back[name], values), name


def test_names_and_shapes_are_those_of_the_hub(tmp_path: Path) -> None:
    """Read with safetensors' own reader, compared with the list written out by hand."""
    config = tiny_config()
    save_checkpoint(tmp_path, config, random_params(config, 0, torch.bfloat16), shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, tuple[int, ...]] = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                assert index[key] == path.name
                found[key] = tuple(file.get_tensor(key).shape)
    assert found == hub_shapes(config)
    assert index.keys() == found.keys()


def test_stored_dtype_is_asked_for_but_the_bias_stays(tmp_path: Path) -> None:
    config = tiny_config()
    save_checkpoint(tmp_path, config, random_params(config, 0, torch.float32), dtype=torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            is_bias = key.endswith("e_score_correction_bias")
            expected = torch.float32 if is_bias else torch.bfloat16
            assert file.get_tensor(key).dtype is expected
    assert read_config(tmp_path).torch_dtype is torch.bfloat16


@pytest.mark.parametrize("stacked", [False, True])
def test_block_fp8(stacked: bool, tmp_path: Path) -> None:
    """Loaded values are the dequantised ones; what published files keep is not quantised."""
    config, block = tiny_config(), BlockFp8(8, 8, True, ())
    params = random_params(config, 0, torch.float32)
    save_checkpoint(tmp_path, config, params, fp8=block, stacked=stacked)
    stored = read_config(tmp_path)
    assert stored.quantization == block
    back = load_model_params(tmp_path, stored, torch.float32)
    kept = ("norm", "router", "embed", "lm_head", "weights_proj")
    num_rounded = 0
    for name, values in params.items():
        if any(word in name for word in kept):
            assert torch.equal(back[name], values), name
            continue
        assert not torch.equal(back[name], values), name
        num_rounded += 1
        if name.endswith(("gate_up", "gate_up.weight")):
            continue  # stored as two matrices: blocks begin anew at the first up row
        assert torch.equal(back[name], dequantise_blocks(*quantise_blocks(values, block), block))
    assert num_rounded > 20


def test_a_folder_with_weights_is_not_written_over(tmp_path: Path) -> None:
    config = tiny_config()
    params = random_params(config, 0, torch.float32)
    save_checkpoint(tmp_path, config, params)
    with pytest.raises(ConfigError, match="already holds"):
        save_checkpoint(tmp_path, config, params)


def test_missing_parameter_and_bad_shard_count(tmp_path: Path) -> None:
    config = tiny_config()
    params = random_params(config, 0, torch.float32)
    with pytest.raises(ConfigError, match="shards is 0"):
        save_checkpoint(tmp_path, config, params, shards=0)
    del params["norm.weight"]
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        save_checkpoint(tmp_path, config, params)
    assert not list(tmp_path.glob("*.safetensors"))
