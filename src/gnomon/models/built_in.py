"""Where the trained model is that ships with gnomon: every command takes it if none is named.

Out: `built_in_folder()`, an ordinary model folder in the package; MODEL_CARD.md in it says what it
     can do. Needs no torch, so that the side of an engine that speaks with people can ask too.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def built_in_folder() -> Path:
    """The folder of the built-in model."""
    return Path(str(files("gnomon") / "assets" / "tiny"))
