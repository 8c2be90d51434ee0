"""What a user may call a model, and what opening it gives."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from gnomon.errors import CheckpointError, ConfigError
from gnomon.models.built_in import built_in_folder
from gnomon.models.config import Family
from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.generation_defaults import GenerationDefaults
from gnomon.models.random_model import random_params
from gnomon.models.sources import ModelSource, open_model, parse_model_spec
from gnomon.models.tiny_shapes import tiny_shape
from tests.unit.models.checkpoint_folders import (
    small_shape,
    stored_tensors,
    tiny_config,
    write_folder,
)


def test_random_spec_of_the_issue() -> None:
    source = parse_model_spec("random:deepseek_v32,layers=4,seed=7")
    expected = read_config(tiny_shape(Family.DEEPSEEK_V32), {"num_hidden_layers": 4})
    label = "random:deepseek_v32,layers=4,seed=7"
    assert source == ModelSource(label, expected, None, 7)


@pytest.mark.parametrize("family", list(Family))
def test_random_spec_without_settings_is_the_tiny_shape(family: Family) -> None:
    assert parse_model_spec(f"random:{family}").config == read_config(tiny_shape(family))


def test_default_is_the_trained_model_that_ships() -> None:
    source = parse_model_spec(None, default_vocab_size=777, default_seed=3)
    assert source.folder is not None
    assert source.folder == built_in_folder()
    assert (source.label, source.config.model_type) == ("tiny", Family.DEEPSEEK_V32)
    assert source.config == read_config(source.folder), "a folder's vocabulary is its own"
    changed = parse_model_spec(None, overrides={"index_topk": 5})
    assert changed.config.index_topk == 5


def test_a_random_model_fits_the_tokenizer() -> None:
    source = parse_model_spec("random:deepseek_v32", default_vocab_size=777, default_seed=3)
    assert (source.config.vocab_size, source.seed, source.folder) == (777, 3, None)
    stated = parse_model_spec("random:glm_moe_dsa,vocab=99,seed=0", default_vocab_size=777)
    assert (stated.config.vocab_size, stated.seed) == (99, 0)


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ("hidden_size=64", "hidden_size", 64),
        ("topk=8", "index_topk", 8),
        ("pattern=FFSS,layers=4", "indexer_types", ("full", "full", "shared", "shared")),
        ("layers=2,indexer_types=full+shared", "indexer_types", ("full", "shared")),
        ('layers=2,mlp_layer_types=["dense","sparse"]', "mlp_layer_types", ("dense", "sparse")),
        ("eos=[3,5],tie_word_embeddings=true", "eos_token_ids", (3, 5)),
        ("rms_norm_eps=1e-3", "rms_norm_eps", 1e-3),
        ("dtype=bfloat16", "torch_dtype", torch.bfloat16),
        ("hadamard=true", "index_hadamard", True),
    ],
)
def test_random_settings(settings: str, field: str, value: object) -> None:
    config = parse_model_spec(f"random:glm_moe_dsa,{settings}").config
    assert getattr(config, field) == value


def test_random_settings_reach_into_the_rotary_fields() -> None:
    config = parse_model_spec("random:deepseek_v32,rope_theta=5e5,yarn_factor=4").config
    assert config.rope.theta == 5e5
    assert config.rope.yarn is not None
    assert config.rope.yarn.factor == 4.0


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("random:deepseek_v31", r"no family 'deepseek_v31'. Did you mean 'deepseek_v32'"),
        ("random:", "no family ''"),
        ("random:deepseek_v32,layer=4", "no field 'layer'. Did you mean 'layers'"),
        ("random:deepseek_v32,index_top_k=4", "Did you mean 'index_topk'"),
        ("random:deepseek_v32,zzz=4", "Known: "),
        ("random:deepseek_v32,model_type=glm_moe_dsa", "no field 'model_type'"),
        ("random:deepseek_v32,layers", "'layers' has no value"),
        ("random:deepseek_v32,", "'' has no value"),
        ("random:deepseek_v32,layers=4,num_hidden_layers=5", "given twice"),
        ("random:deepseek_v32,seed=1,seed=2", "given twice"),
        ("random:deepseek_v32,seed=-1", "seed is '-1'"),
        ("random:deepseek_v32,seed=x", "seed is 'x'"),
        ("random:deepseek_v32,layers=0", "'num_hidden_layers' is 0"),
        ("random:deepseek_v32,layers=four", "'num_hidden_layers' is 'four'"),
    ],
)
def test_random_specs_that_are_refused(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_model_spec(spec)


def test_hub_id_says_which_files_to_place_where() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model_spec("deepseek-ai/DeepSeek-V3.2")
    message = str(caught.value)
    for part in ("hub id", "downloads nothing", "config.json", "safetensors", "tokenizer.json"):
        assert part in message


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        parse_model_spec(tmp_path / "not" / "there")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        parse_model_spec(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"config\.json is not there"):
        parse_model_spec(tmp_path)


def test_folder_with_overrides(tmp_path: Path) -> None:
    write_folder(tmp_path / "my-model", small_shape(), stored_tensors(tiny_config()))
    source = parse_model_spec(tmp_path / "my-model", overrides={"index_topk": 5})
    assert (source.label, source.config.index_topk) == ("my-model", 5)
    assert source.folder == tmp_path / "my-model"


def test_open_random_model() -> None:
    loaded = open_model("random:glm_moe_dsa,layers=3,eos=2", torch.bfloat16)
    assert loaded.dtype is torch.bfloat16
    assert loaded.generation_defaults == GenerationDefaults((2,))
    assert loaded.folder is None
    assert loaded.extras == ()
    assert loaded.revision == open_model("random:glm_moe_dsa,layers=3,eos=2").revision
    assert loaded.revision != open_model("random:glm_moe_dsa,layers=3,eos=2,seed=1").revision
    assert loaded.revision != open_model("random:glm_moe_dsa,layers=4,eos=2").revision


def test_open_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = small_shape(torch_dtype="bfloat16", eos_token_id=4)
    tensors = stored_tensors(tiny_config(), torch.bfloat16)
    mtp = {f"model.layers.3.{name}.weight": torch.zeros(2) for name in ("eh_proj", "enorm")}
    write_folder(tmp_path, shape, tensors | mtp, num_shards=2)
    generation = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [4, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with caplog.at_level(logging.INFO):
        loaded = open_model(tmp_path)
    assert loaded.dtype is torch.bfloat16
    sampling = {"temperature": 0.6, "top_p": 0.95}
    assert loaded.generation_defaults == GenerationDefaults((4, 5), sampling)
    assert {extra.key for extra in loaded.extras} == mtp.keys()
    assert "2 tensors not loaded: layer 3 is an MTP layer" in caplog.text


def test_revision_tells_weights_apart(tmp_path: Path) -> None:
    config = tiny_config()
    revisions = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_checkpoint(tmp_path / name, config, random_params(config, seed, torch.float32))
        revisions.append(open_model(tmp_path / name).revision)
    assert revisions[0] == revisions[1]
    assert revisions[0] != revisions[2]
    overridden = parse_model_spec(tmp_path / "b", overrides={"latent_norm_eps": 1e-3})
    assert open_model(overridden).revision != revisions[0]


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({}, {}),
        ({"_from_model_config": True, "transformers_version": "5"}, {}),
        ({"do_sample": True, "top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        (
            {"max_new_tokens": 9, "repetition_penalty": 1.1},
            {"max_tokens": 9, "repetition_penalty": 1.1},
        ),
    ],
)
def test_generation_defaults(
    values: dict[str, object], sampling: dict[str, float], tmp_path: Path
) -> None:
    write_folder(tmp_path, small_shape(eos_token_id=1), stored_tensors(tiny_config()))
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert open_model(tmp_path).generation_defaults == GenerationDefaults((1,), sampling)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": 2},
        {"top_k": -1},
        {"repetition_penalty": 0},
        {"eos_token_id": 99},
        {"max_new_tokens": 0},
    ],
)
def test_generation_values_out_of_range(values: dict[str, object], tmp_path: Path) -> None:
    write_folder(tmp_path, small_shape(), stored_tensors(tiny_config()))
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=next(iter(values))):
        open_model(tmp_path)


def test_damaged_weights_stop_the_opening(tmp_path: Path) -> None:
    write_folder(tmp_path, small_shape(), stored_tensors(tiny_config()))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        open_model(tmp_path)
