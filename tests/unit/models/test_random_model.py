"""Random weights: seeded, independent of other layers, with the statistics of the recipe."""

from __future__ import annotations

import pytest
import torch

from gnomon.models.config import Family
from gnomon.models.config_reading import read_config
from gnomon.models.params import param_specs
from gnomon.models.random_model import random_params
from gnomon.models.tiny_shapes import tiny_shape
from tests.unit.models.checkpoint_folders import tiny_config


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    config = tiny_config()
    first, again, other = (random_params(config, seed, torch.float32) for seed in (5, 5, 6))
    for name in first:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_a_layer_does_not_depend_on_the_layers_around_it() -> None:
    few = random_params(tiny_config(num_hidden_layers=2), 0, torch.float32)
    many = random_params(tiny_config(num_hidden_layers=3), 0, torch.float32)
    assert few.keys() < many.keys()
    assert all(torch.equal(few[name], many[name]) for name in few)


@pytest.mark.parametrize("family", list(Family))
def test_recipe(family: Family) -> None:
    """Mean and standard deviation of each kind of tensor, within 5 standard errors."""
    config = read_config(tiny_shape(family))
    params = random_params(config, 0, torch.float32)
    assert params.keys() == {spec.name for spec in param_specs(config)}
    for name, values in params.items():
        if name == "embed.weight":
            mean, std = 0.0, 1.0
        elif name.endswith("norm.weight"):
            mean, std = 1.0, 0.1
        elif name.endswith("k_norm.bias"):
            mean, std = 0.0, 0.1
        elif name.endswith("router.bias"):
            mean, std = 0.0, 0.05
        else:
            mean, std = 0.0, values.shape[-1] ** -0.5
        count = values.numel()
        assert abs(float(values.mean()) - mean) < 5 * std / count**0.5, name
        assert abs(float(values.std()) / std - 1) < 5 / (2 * count) ** 0.5, name


def test_what_stays_in_float32_holds_values_of_the_engines_dtype() -> None:
    """As if loaded from a checkpoint of that dtype; only the router's bias has more digits."""
    params = random_params(tiny_config(), 0, torch.bfloat16)
    full = random_params(tiny_config(), 0, torch.float32)
    for name, values in params.items():
        if values.dtype is torch.float32 and name.endswith("weight"):
            assert torch.equal(values, full[name].bfloat16().float())
        elif name.endswith("router.bias"):
            assert torch.equal(values, full[name])
        else:
            assert values.dtype is torch.bfloat16


def test_tied_head_is_the_embedding() -> None:
    params = random_params(tiny_config(tie_word_embeddings=True), 0, torch.float32)
    assert params["lm_head.weight"] is params["embed.weight"]


def test_experts_differ() -> None:
    experts = random_params(tiny_config(), 0, torch.float32)["layers.1.experts.gate_up"]
    assert not torch.equal(experts[0], experts[1])
