"""Parameter names, shapes and where they are stored, against a list written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from gnomon.models.config import Family
from gnomon.models.config_reading import read_config
from gnomon.models.params import param_dtype, param_specs
from gnomon.models.tiny_shapes import tiny_shape
from tests.unit.models.checkpoint_folders import hub_shapes, tiny_config


@pytest.mark.parametrize("family", list(Family))
def test_sources_are_the_hub_names_and_shapes(family: Family) -> None:
    config = tiny_config(family)
    sources = [source for spec in param_specs(config) for source in spec.sources]
    assert len({source.key for source in sources}) == len(sources)
    assert {source.key: source.shape for source in sources} == hub_shapes(config)


@pytest.mark.parametrize(("family", "count"), [("deepseek_v32", 305), ("glm_moe_dsa", 419)])
def test_tiny_models_have_as_many_tensors_as_transformers_saves(family: str, count: int) -> None:
    """The counts are measured ones: oracle_math §2.4."""
    config = read_config(tiny_shape(Family(family)))
    assert sum(len(spec.sources) for spec in param_specs(config)) == count


@pytest.mark.parametrize("family", list(Family))
def test_sources_fill_each_parameter_exactly_once(family: Family) -> None:
    for spec in param_specs(tiny_config(family)):
        hits = torch.zeros(spec.shape, dtype=torch.int32)
        for source in spec.sources:
            place = hits[source.index]
            assert tuple(place.shape) == source.shape
            assert place.is_contiguous()
            place += 1
        assert bool((hits == 1).all()), spec.name
        if spec.stacked is not None:
            assert spec.stacked.shape == spec.shape


def test_what_stays_in_float32() -> None:
    kept = {spec.name for spec in param_specs(tiny_config()) if spec.keep_fp32}
    assert {name.split(".", 2)[2] for name in kept} == {
        "router.weight",
        "router.bias",
        "indexer.weights_proj.weight",
    }
    spec = next(spec for spec in param_specs(tiny_config()) if spec.keep_fp32)
    assert param_dtype(spec, torch.bfloat16) is torch.float32
    assert param_dtype(spec, torch.float64) is torch.float64


def test_layers_that_share_have_no_index_parameters() -> None:
    config = tiny_config(Family.GLM_MOE_DSA, index_topk_pattern="FSF")
    names = [spec.name for spec in param_specs(config)]
    layers = {name.split(".")[1] for name in names if ".indexer." in name}
    assert layers == {"0", "2"}


def test_tied_head_is_no_parameter_of_its_own() -> None:
    names = [spec.name for spec in param_specs(tiny_config(tie_word_embeddings=True))]
    assert "lm_head.weight" not in names
    assert math.prod(param_specs(tiny_config())[-1].shape) > 0
    assert param_specs(tiny_config())[-1].name == "lm_head.weight"
