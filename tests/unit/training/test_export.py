"""A checkpoint survives saving, resuming and export; transformers and gnomon load what comes out.

Oracle: transformers' own modules over the exported folder, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gnomon.models.sources import open_model
from training import checkpoint, start
from training.average import average
from training.export import write_folder
from training.model import Model
from training.muon import Optimiser, Rates
from training.parameters import initial_parameters, parameter_shapes
from training.selection import Choice
from training.shapes import CONFIGS, Shape

SMALL = {"hidden_size": 64, "intermediate_size": 64, "index_topk": 16}


def small(name: str) -> dict[str, Any]:
    return {**CONFIGS[name], **SMALL}


@pytest.mark.parametrize("name", ["tiny", "tiny_glm"])
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = small(name)
    shape = Shape.of(config)
    params = initial_parameters(shape, 3, "cpu")
    with torch.no_grad():
        for value in params.values():
            value.copy_(value.to(torch.bfloat16))
    write_folder(tmp_path, config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(3, 4000, (1, 60), generator=torch.Generator().manual_seed(2))
    model = Model(shape, "cpu", torch.float32)
    with torch.no_grad():
        expected = theirs(ids).logits[0]
        hidden = model.hidden(params, ids, model.start(ids, Choice.EXACT))
        ours = hidden @ params["lm_head.weight"].T
    torch.testing.assert_close(ours, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["tiny", "tiny_glm"])
def test_every_parameter_is_stored_once_and_the_mtp_layer_is_known(
    name: str, tmp_path: Path
) -> None:
    config = small(name)
    params = initial_parameters(Shape.of(config), 0, "cpu")
    write_folder(tmp_path, config, params)
    stored = load_file(tmp_path / "model.safetensors")
    num_stored = sum(value.numel() for value in stored.values())
    assert num_stored == sum(value.numel() for value in params.values())
    loaded = open_model(tmp_path)
    prefix = f"model.layers.{config['num_hidden_layers']}."
    assert {extra.key for extra in loaded.extras} == {key for key in stored if prefix in key}
    assert f"{prefix}eh_proj.weight" in stored
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    shape = Shape.of(small("tenth"))
    ids = torch.randint(3, 4000, (2, 32), generator=torch.Generator().manual_seed(5))
    weight = torch.ones(2, 32)

    def step(params: dict[str, torch.Tensor], optimiser: Optimiser) -> float:
        run = model.start(ids, Choice.EXACT, torch.arange(8).repeat(2, 1))
        found = model.losses(params, ids, weight, run)
        (found.text + found.mtp + found.index).backward()
        optimiser.begin(1.0)
        optimiser.update(params)
        return float(found.text.detach())

    model = Model(shape, "cpu", torch.float32)
    params = initial_parameters(shape, 0, "cpu")
    optimiser = Optimiser(params, Rates())
    first = step(params, optimiser)
    checkpoint.save(tmp_path, params, optimiser.state, {"step": 1})
    assert all(path.stat().st_size <= 16_000_000 for path in tmp_path.iterdir())
    again = initial_parameters(shape, 9, "cpu")
    other = Optimiser(again, Rates())
    assert checkpoint.load(tmp_path, again, other.state) == {"step": 1}
    other.num_steps = 1
    assert all(torch.equal(again[name], params[name]) for name in parameter_shapes(shape))
    second, resumed = step(params, optimiser), step(again, other)
    assert second == resumed
    assert second < first
    third, resumed = step(params, optimiser), step(again, other)
    assert abs(third - resumed) < 0.02  # moments were rounded to bfloat16


@pytest.mark.parametrize("name", ["tiny", "tiny_glm"])
def test_starting_from_a_model_folder_undoes_export(name: str, tmp_path: Path) -> None:
    config = small(name)
    shape = Shape.of(config)
    write_folder(tmp_path / "one", config, initial_parameters(shape, 3, "cpu"))
    params = initial_parameters(shape, 4, "cpu")
    start.fill(params, tmp_path / "one")
    write_folder(tmp_path / "two", config, params)
    first, second = (
        (tmp_path / place / "model.safetensors").read_bytes() for place in ("one", "two")
    )
    assert first == second


def test_starting_from_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, small("tiny"), initial_parameters(Shape.of(small("tiny")), 0, "cpu"))
    with pytest.raises(ValueError, match="embed_tokens"):
        start.fill(initial_parameters(Shape.of(CONFIGS["tiny"]), 0, "cpu"), tmp_path)
    fewer = Shape.of({**small("tiny"), "num_hidden_layers": 5})
    with pytest.raises(ValueError, match=r"layers\.5"):
        start.fill(initial_parameters(fewer, 0, "cpu"), tmp_path)


def test_the_average_of_two_models_is_their_mean_and_of_one_itself(tmp_path: Path) -> None:
    shape = Shape.of(small("tenth"))
    both = [initial_parameters(shape, seed, "cpu") for seed in (1, 2)]
    for name, params in zip("ab", both, strict=True):
        write_folder(tmp_path / name, small("tenth"), params)
    average([tmp_path / "a"], tmp_path / "same")
    for path in (tmp_path / "a").iterdir():
        if path.suffix == ".json":
            assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()
    average([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    a, b, same, mean = (
        load_file(tmp_path / name / "model.safetensors") for name in ("a", "b", "same", "mean")
    )
    assert a.keys() == same.keys() == mean.keys()
    assert all(a[name].equal(same[name]) for name in a)
    for name, value in mean.items():
        exact = (a[name].double() + b[name].double()) / 2
        assert (value.double() - exact).abs().max() <= exact.abs().max() * 2**-8
        assert value.dtype == a[name].dtype


def test_models_of_different_shapes_have_no_average(tmp_path: Path) -> None:
    for name, hidden in (("a", 64), ("b", 96)):
        config = {**small("tenth"), "hidden_size": hidden}
        write_folder(tmp_path / name, config, initial_parameters(Shape.of(config), 0, "cpu"))
    with pytest.raises(ValueError, match="one shape"):
        average([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
