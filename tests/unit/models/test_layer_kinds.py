"""Few layers stand for all: every pair of neighbours is kept, and nothing else is needed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.models.layer_kinds import attending, kept, kind_of, thinned
from gnomon.models.sources import open_model


def pairs(kinds):
    return set(pairwise([None, *kinds]))


@given(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=40))
def test_every_pair_of_neighbours_is_kept(kinds):
    numbers = kept(kinds)
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    found = [kinds[number] for number in numbers]
    assert pairs(kinds) <= pairs(found)
    assert found[-1] == kinds[-1]
    assert len(found) <= 2 * len(pairs(kinds)) + 1


@pytest.mark.parametrize(
    ("kinds", "numbers"),
    [("DMMMMM", [0, 1, 2]), ("DDDMMM", [0, 1, 3, 4]), ("A", [0]), ("AAAA", [0, 1])],
)
def test_usual_models_become_small(kinds, numbers):
    assert kept(kinds) == numbers


def model(**fields):
    spec = ",".join(f"{name}={value}" for name, value in fields.items())
    return open_model(f"random:deepseek_v32,{spec}").model


def test_layers_differ_by_their_weights_and_not_by_their_place():
    found = model(layers=5, first_k_dense_replace=2)
    kinds = [kind_of(layer) for layer in found.layers]
    assert kinds[0] == kinds[1] != kinds[2]
    assert len(set(kinds[2:])) == 1
    thin = thinned(found)
    assert [found.layers.index(layer) for layer in thin.layers] == [0, 1, 2, 3]
    assert len(attending(found).layers) == 1
    assert len(found.layers) == 5
    assert thin.head is found.head


@pytest.mark.parametrize(
    "changed",
    [
        torch.zeros(8, 4).T,
        torch.zeros(4, 8, dtype=torch.bfloat16),
        torch.zeros(4, 9)[:, 1:],
        torch.zeros(40)[1:33].view(4, 8),
    ],
    ids=["strides", "dtype", "width", "alignment"],
)
def test_what_kernels_tell_apart_is_another_kind(changed):
    assert kind_of(torch.zeros(4, 8)) == kind_of(torch.ones(4, 8))
    assert kind_of(torch.zeros(4, 8)) != kind_of(changed)


def test_a_layer_that_takes_a_list_is_another_kind():
    found = open_model("random:glm_moe_dsa,layers=6").model
    has_lists = {layer.indexer is not None for layer in found.layers}
    assert len({kind_of((layer.attention, layer.indexer)) for layer in found.layers}) == len(
        has_lists
    )
    assert len(attending(found).layers) == len(has_lists)
