"""config.json to ModelConfig: published shapes, both rotary spellings, defaults, sharing rules."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.models.config import BlockFp8, Family, RopeConfig
from gnomon.models.config_reading import read_config
from gnomon.models.config_writing import config_to_json
from gnomon.models.tiny_shapes import tiny_shape
from tests.unit.models.published_configs import DEEPSEEK_V32, GLM_5_2


def test_deepseek_as_published() -> None:
    config = read_config(DEEPSEEK_V32)
    assert config.model_type is Family.DEEPSEEK_V32
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 58
    assert config.indexer_types == ("full",) * 61
    assert config.indexer_rope_interleave is False
    assert config.latent_norm_eps == 1e-6
    assert config.quantization == BlockFp8(128, 128, True, ())
    assert config.torch_dtype is torch.bfloat16
    assert config.eos_token_ids == (1,)
    assert config.bos_token_id == 0
    yarn = config.rope.yarn
    assert yarn is not None
    assert (yarn.attention_factor, yarn.mscale_all_dim, yarn.truncate) == (1.0, 1.0, True)
    # oracle_math §1.4 gives this number for 192 dimensions and a factor of 40.
    assert config.softmax_scale() == pytest.approx(0.13523378, abs=5e-9)


def test_glm_as_published() -> None:
    config = read_config(GLM_5_2)
    full = [layer for layer in range(78) if config.has_indexer(layer)]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert len(full) == 21
    assert [config.index_source(layer) for layer in (0, 2, 3, 5, 6, 7, 77)] == [
        0,
        2,
        2,
        2,
        6,
        6,
        74,
    ]
    assert config.softmax_scale() == 0.0625
    assert config.rope.theta == 8e6
    assert config.rope.yarn is None
    assert (config.n_group, config.topk_group, config.routed_scaling_factor) == (1, 1, 2.5)
    assert config.indexer_rope_interleave is True
    assert config.latent_norm_eps == 1e-5
    assert config.eos_token_ids == (154820, 154827, 154829)
    dims = config.attention_dims()
    assert (dims.num_heads, dims.v_head_dim, dims.index_topk) == (64, 256, 2048)


def test_hugging_face_eps_is_one_override_away() -> None:
    assert read_config(GLM_5_2, {"latent_norm_eps": 1e-6}).latent_norm_eps == 1e-6


@pytest.mark.parametrize("family", list(Family))
def test_interleaving_defaults_to_the_family(family: Family) -> None:
    shape = tiny_shape(family)
    shape.pop("indexer_rope_interleave", None)
    assert read_config(shape).indexer_rope_interleave is (family is Family.GLM_MOE_DSA)
    flipped = {"indexer_rope_interleave": family is not Family.GLM_MOE_DSA}
    assert read_config(shape, flipped).indexer_rope_interleave is (family is not Family.GLM_MOE_DSA)


def test_both_rotary_spellings_say_the_same() -> None:
    old = read_config(DEEPSEEK_V32)
    nested = dict(DEEPSEEK_V32)
    theta, scaling = nested.pop("rope_theta"), nested.pop("rope_scaling")
    assert isinstance(scaling, dict)
    for kind in ("rope_type", "type"):
        inner = {name: value for name, value in scaling.items() if name != "type"}
        nested["rope_parameters"] = {"rope_theta": theta, kind: "yarn", **inner}
        assert read_config(nested) == old


@pytest.mark.parametrize(
    ("mscale", "all_dim", "cos_factor", "softmax_factor"),
    [
        (1.0, 1.0, 1.0, 1 + 0.1 * math.log(40)),
        (0.7, 1.0, (1 + 0.07 * math.log(40)) / (1 + 0.1 * math.log(40)), 1 + 0.1 * math.log(40)),
        (None, None, 1 + 0.1 * math.log(40), 1.0),
        (1.0, 0.0, 1 + 0.1 * math.log(40), 1.0),
    ],
)
def test_yarn_multipliers(
    mscale: float | None, all_dim: float | None, cos_factor: float, softmax_factor: float
) -> None:
    config = read_config(
        tiny_shape(Family.DEEPSEEK_V32),
        {"rope_parameters.mscale": mscale, "rope_parameters.mscale_all_dim": all_dim},
    )
    assert config.rope.yarn is not None
    assert config.rope.yarn.attention_factor == pytest.approx(cos_factor)
    assert config.softmax_scale() == pytest.approx(48**-0.5 * softmax_factor**2)


@given(
    num_layers=st.integers(1, 40),
    freq=st.integers(1, 9),
    offset=st.integers(1, 9),
)
def test_frequency_rule_layer_by_layer(num_layers: int, freq: int, offset: int) -> None:
    """Layer i is full iff i < offset, or (i − offset + 1) is a multiple of the frequency."""
    config = read_config(
        tiny_shape(Family.GLM_MOE_DSA),
        {
            "num_hidden_layers": num_layers,
            "index_topk_freq": freq,
            "index_skip_topk_offset": offset,
        },
    )
    for layer in range(num_layers):
        is_full = layer < offset or (layer - offset + 1) % freq == 0
        assert config.has_indexer(layer) is is_full
        source = config.index_source(layer)
        assert config.has_indexer(source)
        assert not any(config.has_indexer(between) for between in range(source + 1, layer + 1))


def test_list_wins_over_pattern_and_pattern_over_frequency() -> None:
    shape = tiny_shape(Family.GLM_MOE_DSA)
    by_frequency = read_config(shape).indexer_types
    shape["index_topk_pattern"] = "FSFSFSFS"
    by_pattern = read_config(shape).indexer_types
    shape["indexer_types"] = ["full"] * 7 + ["shared"]
    by_list = read_config(shape).indexer_types
    assert by_frequency == ("full",) * 3 + ("shared",) * 3 + ("full", "shared")
    assert by_pattern == ("full", "shared") * 4
    assert by_list == ("full",) * 7 + ("shared",)


def test_layer_lists_may_go_on_for_the_mtp_layer() -> None:
    shape = tiny_shape(Family.GLM_MOE_DSA)
    shape |= {
        "num_nextn_predict_layers": 1,
        "indexer_types": ["full"] * 8 + ["shared"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 8,
        "layer_types": ["deepseek_sparse_attention"] * 9,
    }
    config = read_config(shape)
    assert len(config.indexer_types) == len(config.mlp_layer_types) == 8
    assert [config.is_dense_layer(layer) for layer in range(8)] == [True] + [False] * 7


@pytest.mark.parametrize("spelling", ["deepseek_sparse_attention", "indexed_attention"])
def test_layer_types_of_old_and_new_transformers(spelling: str) -> None:
    shape = tiny_shape(Family.DEEPSEEK_V32)
    assert read_config(shape | {"layer_types": [spelling] * 6}) == read_config(shape)


def test_end_tokens_as_number_list_null_and_absent() -> None:
    shape = tiny_shape(Family.GLM_MOE_DSA)
    for value, expected in ((7, (7,)), ([7, 9, 7], (7, 9)), (None, ())):
        assert read_config(shape | {"eos_token_id": value}).eos_token_ids == expected
    del shape["eos_token_id"], shape["bos_token_id"]
    assert read_config(shape).eos_token_ids == (1,)  # what transformers assumes
    assert read_config(shape).bos_token_id == 0


@pytest.mark.parametrize("family", list(Family))
def test_written_config_reads_back_equal(family: Family, tmp_path: Path) -> None:
    config = read_config(tiny_shape(family), {"eos_token_id": [3, 5], "index_hadamard": True})
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(config)))
    assert read_config(tmp_path) == config
    block = BlockFp8(128, 64, True, ("lm_head",))
    stored = read_config(config_to_json(config, dtype=torch.float16, fp8=block))
    assert stored.quantization == block
    assert stored.torch_dtype is torch.float16


def test_object_overrides_merge() -> None:
    config = read_config(tiny_shape(Family.DEEPSEEK_V32), {"rope_parameters": {"factor": 8}})
    assert config.rope.yarn is not None
    assert config.rope.yarn.factor == 8.0
    assert config.rope.yarn.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 5e5},
        {"rope_parameters.rope_theta": 5e5},
        {"rope_scaling": {"rope_theta": 5e5}},
    ],
)
@pytest.mark.parametrize("published", [DEEPSEEK_V32, GLM_5_2])
def test_an_override_wins_over_every_spelling(
    published: dict[str, object], overrides: dict[str, object]
) -> None:
    before = read_config(published).rope
    assert read_config(published, overrides).rope == RopeConfig(5e5, before.yarn)
    for name in ("dtype", "torch_dtype"):
        assert read_config(published, {name: "float16"}).torch_dtype is torch.float16
    for name in ("n_routed_experts", "num_experts", "num_local_experts"):
        assert read_config(published, {name: 64}).n_routed_experts == 64


def test_rope_type_override_wins_over_the_old_spelling() -> None:
    glm = GLM_5_2 | {"rope_parameters": {"rope_theta": 8e6, "type": "default"}}
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}
    assert read_config(glm, {"rope_parameters": yarn}).rope.yarn is not None


def test_misspelt_override_names_the_nearest_field() -> None:
    with pytest.raises(ConfigError, match=r"index_topp.*Did you mean 'index_topk'"):
        read_config(GLM_5_2, {"index_topp": 4})
