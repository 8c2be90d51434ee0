"""The needle grid as a picture: depth down, length across, share of right answers in each cell.

In:  a NeedleResult, a path that ends in .png, .svg or .pdf.
Out: the file. A second panel shows the share of layers that listed the needle, if somebody looked.
Errors: ConfigError if matplotlib is missing or the path cannot be written; `check_picture` says so
before anything is asked.
Not here: the map in the terminal (cli/eval_display.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.errors import ConfigError
from gnomon.evaluate.needle import NeedleResult, listed_share
from gnomon.evaluate.score import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
Grid = list[list[float]]  # by depth, then length


def check_picture(path: Path) -> None:
    """Raise ConfigError unless a picture can be drawn there."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"--picture {path} needs matplotlib, which is not installed: "
            "pip install 'gnomon[plot]', or leave --picture out (the terminal shows the map too)."
        )
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--picture is {str(path)!r}: the name has to end in {SUFFIXES}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--picture is {str(path)!r}: there is no folder of that name.")


def recall_grid(result: NeedleResult) -> Grid:
    """The share of right answers in each cell."""
    return [
        [Score.of(case.is_correct for case in result.at(length, depth)).share
         for length in result.lengths]
        for depth in result.depths
    ]  # fmt: skip


def listed_grid(result: NeedleResult) -> Grid | None:
    """The share of layers that listed the needle in each cell; None if nobody looked."""
    if listed_share(result.cases) is None:
        return None
    return [
        [listed_share(result.at(length, depth)) or 0.0 for length in result.lengths]
        for depth in result.depths
    ]


def draw_heat_map(result: NeedleResult, title: str, path: Path) -> None:
    """Write the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [("right answers", recall_grid(result))]
    listed = listed_grid(result)
    if listed is not None:
        panels.append(("layers that listed the needle", listed))
    figure = Figure(figsize=(1.5 + 4.2 * len(panels), 1.6 + 0.34 * len(result.depths)))
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    for place, (name, grid) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), place)
        _draw(axes, grid, result)
        axes.set_title(name, fontsize=9)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--picture {path} cannot be written: {error}") from None


def _draw(axes: Axes, grid: Grid, result: NeedleResult) -> None:
    """One panel; each cell is labelled with its percentage."""
    axes.imshow(grid, cmap="RdYlGn", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(result.lengths)), [f"{n:,}" for n in result.lengths], fontsize=8)
    axes.set_yticks(range(len(result.depths)), [f"{d:.0%}" for d in result.depths], fontsize=8)
    axes.set_xlabel("length in tokens", fontsize=8)
    axes.set_ylabel("depth of the needle", fontsize=8)
    for row, shares in enumerate(grid):
        for column, share in enumerate(shares):
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=7)
