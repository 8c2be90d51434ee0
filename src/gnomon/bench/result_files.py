"""Files of results: whether they can be written, asked before anything is measured; empty pictures.

In:  the paths of --json and --picture. Out: nothing, or ConfigError; JSON; a matplotlib figure.
Not here: what is drawn (report.py, step_report.py, serving_pictures.py).
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")
DPI = 150


def require_result_files(json_file: Path | None, picture: Path | None) -> None:
    """ConfigError for a file that could not be written when the work is done."""
    for flag, path in (("--json", json_file), ("--picture", picture)):
        if path is None:
            continue
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "it is a folder" if path.is_dir() else f"{folder} is no folder to write in"
            raise ConfigError(f"{flag} {path}: {why}. Give a file in a folder that is there.")
    if picture is not None and picture.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"--picture {picture}: its name has to end with one of {', '.join(FORMATS)}."
        )
    if picture is not None and find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: pip install 'gnomon[plot]', or "
            "leave --picture out."
        )


def write_json(path: Path, value: Any) -> None:
    """Replace the file at once: a run that is cut off leaves the last whole one.

    What is no file of its own (/dev/null, /dev/stdout, a pipe, a link) is written to and stays.
    """
    text = json.dumps(value, indent=1) + "\n"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    fresh = path.with_name(f".{path.name}.part")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches; matplotlib is imported here and not before."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture in the format of its name."""
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
