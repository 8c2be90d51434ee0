"""Saving and resuming: parameters, optimiser, place in the plan; in files of at most 16 MB.

In:  a folder, named tensors, a small JSON object.
Out: part-00.pt, part-01.pt, ... and progress.json, written last: a folder without it is not whole.
Parameters are float32; the optimiser's moments are stored in bfloat16, which halves them and costs
nothing that can be measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PART_BYTES = 15_000_000


def save(folder: Path, params: dict[str, Tensor], state: dict[str, Tensor], place: Any) -> None:
    """Write everything that training needs to go on."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("part-*.pt"), *folder.glob("progress.json")):
        old.unlink()
    tensors = {f"param {name}": value.detach().cpu() for name, value in params.items()}
    tensors |= {f"state {name}": value.detach().cpu().bfloat16() for name, value in state.items()}
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        size += value.nbytes
        if size > PART_BYTES:
            parts.append({})
            size = value.nbytes
        parts[-1][name] = value.clone()
    for number, part in enumerate(parts):
        torch.save(part, folder / f"part-{number:02d}.pt")
    (folder / "progress.json").write_text(json.dumps(place, indent=1) + "\n", encoding="utf-8")


def load(folder: Path, params: dict[str, Tensor], state: dict[str, Tensor] | None) -> Any:
    """Fill params and state in place; what progress.json says."""
    place = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    with torch.no_grad():
        for path in sorted(folder.glob("part-*.pt")):
            for name, value in torch.load(path, weights_only=True).items():
                kind, _, own = name.partition(" ")
                target = params if kind == "param" else state
                if target is not None:
                    target[own].copy_(value)
    return place
