"""The needle grid, as numbers for pictures and as a map in the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.cli.eval_display import print_needle
from gnomon.errors import ConfigError
from gnomon.evaluate.heat_map import check_picture, draw_heat_map, listed_grid, recall_grid
from gnomon.evaluate.needle import NeedleCase, NeedleResult
from gnomon.evaluate.needle_context import Asked
from gnomon.evaluate.needle_text import Fact
from gnomon.evaluate.respondent import Answer
from gnomon.evaluate.score import Usage

LENGTHS, DEPTHS = (512, 1024), (0.0, 0.5, 1.0)


def result(is_seen: bool = True) -> NeedleResult:
    """Right at depth 0; at 0.5 in half of the cases of 512 only; three of four layers listed it."""
    cases = []
    for length in LENGTHS:
        for depth in DEPTHS:
            for sample in range(2):
                is_correct = depth == 0.0 or (depth == 0.5 and length == 512 and sample == 1)
                listed = {layer: layer != 2 or length == 512 for layer in range(4)}
                answer = Answer("", length - 40, 3, listed=listed if is_seen else None)
                asked = Asked(Fact("k", "1234"), depth, "?")
                cases.append(NeedleCase(length, asked, answer, is_correct))
    return NeedleResult(LENGTHS, DEPTHS, tuple(cases), Usage.of((), 1.0))


def test_cells_are_shares_of_their_own_cases() -> None:
    assert recall_grid(result()) == [[1.0, 1.0], [0.5, 0.0], [0.0, 0.0]]
    assert listed_grid(result()) == [[1.0, 0.75]] * 3
    assert listed_grid(result(is_seen=False)) is None


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"map.{suffix}"
    check_picture(path)
    draw_heat_map(result(), "a title", path)
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(starts[suffix])
    draw_heat_map(result(is_seen=False), "a title", path)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_heat_map(result(), "a title", path)


def test_the_map_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_needle(result(), "needle: m")
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert rows[:5] == [
        ["needle:", "m:", "right", "answers", "by", "depth", "and", "length"],
        ["depth", "512", "1,024"],
        ["0%", "100%", "100%"],
        ["50%", "50%", "0%"],
        ["100%", "0%", "0%"],
    ]
    assert "by layer: 0: 100%  1: 100%  2: 50%  3: 100%" in shown
    print_needle(result(is_seen=False), "needle: m")
    assert "not seen" in capsys.readouterr().out
