"""The model that ships is in the wheel, whole, and small enough."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from gnomon.models.built_in import built_in_folder

ROOT = Path(__file__).parents[3]
NEEDED = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "MODEL_CARD.md",
}


def test_the_wheel_holds_the_model(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    [built] = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    folder = built_in_folder()
    assert {path.name for path in folder.iterdir()} >= NEEDED
    with zipfile.ZipFile(built) as archive:
        for path in folder.iterdir():
            assert archive.read(f"gnomon/assets/tiny/{path.name}") == path.read_bytes()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12_000_000
