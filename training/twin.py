"""The twin: the trained DeepSeek model rewritten in GLM's topology, as a start for its training.

In:  the folder of a model of shape "tiny".
Out: the folder of a model of shape "tiny_glm" that computes nearly the same:
     `python -m training.twin --from src/gnomon/assets/tiny --to training/runs/twin`.
What changes: layers that share a selection lose their indexer; an index head's columns take the
order of interleaved rotation (oracle_math §1.5: 2i and 2i + 1 turn together in place of i and
i + 16), which changes no score. What does not carry over: GLM's eps, and its router, which chooses
among all experts where DeepSeek's chooses groups first.
Why it works: the layers that share attend close by, which one list serves for all of them. The
look-up is made in the last layer, and that has its own indexer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from training import start
from training.export import write_folder
from training.parameters import Parameters, initial_parameters, parameter_shapes
from training.shapes import CONFIGS, Shape

INDEX_COLUMNS = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")


def twin_of(source: Parameters, shape: Shape) -> Parameters:
    """Parameters of `shape`, whose index rotation is interleaved, of a model where it is not."""
    found: Parameters = {}
    for name in parameter_shapes(shape):
        value = source[name].detach()
        if ".indexer." in name and name.endswith(INDEX_COLUMNS):
            value = interleaved(value, shape.rope)
        found[name] = value.clone()
    return found


def interleaved(rows: Tensor, dim: int) -> Tensor:
    """Each `dim` rows [n * dim, ...] in the order 0, dim / 2, 1, dim / 2 + 1, ..."""
    order = torch.arange(dim).view(2, -1).T.flatten()
    return rows.unflatten(0, (-1, dim))[:, order].flatten(0, 1)


def main() -> None:
    """Read the command line, convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--to", dest="folder", type=Path, required=True)
    args = parser.parse_args()
    source = initial_parameters(Shape.of(CONFIGS["tiny"]), 0, "cpu")
    start.fill(source, args.source)
    config = CONFIGS["tiny_glm"]
    write_folder(args.folder, config, twin_of(source, Shape.of(config)))


if __name__ == "__main__":
    main()
