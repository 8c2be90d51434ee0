"""The mean of several models of one run: `python -m training.average --of A B --to C`.

In:  model folders of one shape, best of one run, a later one trained on from the earlier: between
     such models the loss has no hill, and their mean is quieter than each, as a falling rate makes.
Out: a model folder: the mean of every tensor, taken in float32; the other files are the first's.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from training.start import read_tensors

WEIGHTS = "model.safetensors"


def average(sources: Sequence[Path], folder: Path) -> None:
    """Write the folder. ValueError: the models have not the same tensors."""
    models = [read_tensors(source / WEIGHTS) for source in sources]
    shapes = [{name: value.shape for name, value in model.items()} for model in models]
    if any(other != shapes[0] for other in shapes[1:]):
        raise ValueError(f"{', '.join(map(str, sources))} are not models of one shape.")
    folder.mkdir(parents=True, exist_ok=True)
    mean = {
        name: torch.stack([model[name].float() for model in models]).mean(0).to(value.dtype)
        for name, value in models[0].items()
    }
    save_file(mean, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    for path in sources[0].iterdir():
        if path.name not in (WEIGHTS, "MODEL_CARD.md"):
            shutil.copy(path, folder / path.name)


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", dest="sources", type=Path, nargs="+", required=True)
    parser.add_argument("--to", dest="folder", type=Path, required=True)
    args = parser.parse_args()
    average(args.sources, args.folder)


if __name__ == "__main__":
    main()
