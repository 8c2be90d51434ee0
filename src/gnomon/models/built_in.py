"""Where the trained models are that ship with gnomon; commands that are told none take the first.

In:  what a user calls a model: nothing, "builtin:NAME", or the path of a folder.
Out: `built_in_folder(name)`, an ordinary model folder in the package; MODEL_CARD.md in it says what
     the model can do. `folder_of(model)`: the folder of any of the three spellings, which need not
     be there. `ConfigError` for a built-in name that is none.
Needs no torch, so that the side of an engine that speaks with people can ask too.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from gnomon.errors import ConfigError

BUILT_IN_PREFIX = "builtin:"
BUILT_IN_NAMES = ("tiny", "tiny_glm")


def built_in_folder(name: str = BUILT_IN_NAMES[0]) -> Path:
    """The folder of a built-in model."""
    if name not in BUILT_IN_NAMES:
        known = ", ".join(BUILT_IN_PREFIX + one for one in BUILT_IN_NAMES)
        raise ConfigError(f"Model '{BUILT_IN_PREFIX}{name}' does not ship with gnomon. {known} do.")
    return Path(str(files("gnomon") / "assets" / name))


def folder_of(model: str | Path | None) -> Path:
    """The folder that a user named; "~" is the user's home."""
    if model is None:
        return built_in_folder()
    text = str(model)
    if text.startswith(BUILT_IN_PREFIX):
        return built_in_folder(text.removeprefix(BUILT_IN_PREFIX))
    return Path(text).expanduser()
