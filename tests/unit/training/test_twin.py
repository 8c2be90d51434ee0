"""The twin in GLM's topology computes what the DeepSeek model computes.

Oracle: the source model, run with the twin's eps and choice of experts, which are the only numbers
of a config that differ; what a shared layer attends is put together by hand.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from training.model import Model
from training.parameters import Parameters, initial_parameters, parameter_shapes
from training.selection import Choice
from training.shapes import CONFIGS, Shape
from training.twin import interleaved, twin_of

SMALL = {"hidden_size": 64, "intermediate_size": 64, "index_topk": 8}


def source_and_twin() -> tuple[Shape, Parameters, Shape]:
    """The source's shape with the twin's eps and router, its parameters; the twin's shape."""
    target = Shape.of({**CONFIGS["tiny_glm"], **SMALL})
    own = Shape.of({**CONFIGS["tiny"], **SMALL})
    params = initial_parameters(own, 5, "cpu")
    with torch.no_grad():
        for name, value in params.items():
            if name.endswith(("k_norm.weight", "k_norm.bias", "router.bias")):
                value += 0.1 * torch.arange(len(value)).sin()
    return replace(own, groups=1, top_groups=1, eps=target.eps), params, target


def outcome(
    shape: Shape, params: Parameters, choice: Choice | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states with those of the MTP layer, and the selections by layer."""
    ids = torch.randint(3, 4000, (2, 40), generator=torch.Generator().manual_seed(1))
    model = Model(shape, "cpu", torch.float32)
    run = model.start(ids, choice)
    with torch.no_grad():
        hidden = model.hidden(params, ids, run)
        both = torch.cat((hidden, model.mtp_hidden(params, ids, hidden, run)))
    return both, [chosen.sort(-1).values for chosen in run.selections]


def test_dense_attention_is_the_same() -> None:
    own, params, target = source_and_twin()
    expected, _ = outcome(own, params, None)
    found, _ = outcome(target, twin_of(params, target), None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_every_indexer_chooses_the_same_keys() -> None:
    own, params, target = source_and_twin()
    whole = replace(target, has_indexer=(True,) * target.layers)
    expected, theirs = outcome(own, params, Choice.EXACT)
    found, ours = outcome(whole, twin_of(params, whole), Choice.EXACT)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    late = slice(SMALL["index_topk"], None)  # rows that see more keys than they may attend
    same = [(a[:, late] == b[:, late]).float().mean() for a, b in zip(ours, theirs, strict=True)]
    assert min(same) > 0.999


def test_shared_layers_have_no_indexer_and_attend_what_the_last_full_layer_chose() -> None:
    own, params, target = source_and_twin()
    twin = twin_of(params, target)
    assert set(twin) == set(parameter_shapes(target)) < set(params)
    assert target.has_indexer == (True, True, False, False, False, True)
    _, chosen = outcome(target, twin, Choice.EXACT)
    _, alone = outcome(own, params, Choice.EXACT)
    for layer in (2, 3, 4):
        assert torch.equal(chosen[layer], chosen[1])
    assert torch.equal(chosen[1][:, 8:], alone[1][:, 8:])
    assert not torch.equal(chosen[5], chosen[1])
    assert not torch.equal(alone[2], alone[1])


def test_the_order_of_interleaved_rotation() -> None:
    assert interleaved(torch.arange(12), 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert interleaved(torch.arange(8).view(4, 2), 4).tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]
