"""What a person sees of an evaluation: progress on stderr, tables and the heat map on stdout.

In:  reports (answered, of); results of gnomon.evaluate.
Out: a bar in a terminal, a line per quarter elsewhere; tables. Cells of the heat map are coloured
     in a terminal and are percentages everywhere.
Not here: the evaluations, JSON and pictures (evaluate.py).
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from gnomon.evaluate.arithmetic import DIGITS, SIGNS, ArithmeticResult
from gnomon.evaluate.gsm8k import Gsm8kResult
from gnomon.evaluate.heat_map import Grid, listed_grid, recall_grid
from gnomon.evaluate.needle import NeedleResult, listed_share
from gnomon.evaluate.score import Score, Usage

LINE_EVERY = 0.25  # of the questions, without a terminal
SIGN_NAMES = {"+": "addition", "-": "subtraction"}
SHADES = ("red", "dark_orange", "yellow", "green_yellow", "green")


class AskingDisplay:
    """A context whose `report` can be handed out as a progress callback."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = 0.0
        self._task: TaskID | None = None
        self._bar: Progress | None = None
        console = Console(stderr=True)
        if console.is_terminal:
            self._bar = Progress(
                TextColumn(name),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, done: int, total: int) -> None:
        """`done` of `total` questions are answered."""
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self._name, total=total)
            self._bar.update(self._task, completed=done)
        elif done == total or done / max(total, 1) - self._told >= LINE_EVERY:
            self._told = done / max(total, 1)
            print(f"{self._name}: {done} of {total} answered", file=sys.stderr, flush=True)


def print_needle(result: NeedleResult, title: str) -> None:
    """Heat map, scores by length, share of layers that listed the needle."""
    console = Console()
    _print_map(console, f"{title}: right answers by depth and length", recall_grid(result), result)
    listed = listed_grid(result)
    if listed is not None:
        _print_map(console, "share of layers whose index list held the needle", listed, result)
    table = _table("length", "n", "right", "95 % interval", "listed", "prompts")
    for length in result.lengths:
        cases = result.at(length)
        share = listed_share(cases)
        sizes = [case.answer.num_prompt_tokens for case in cases]
        table.add_row(
            f"{length:,}",
            *_cells(Score.of(case.is_correct for case in cases)),
            "not seen" if share is None else f"{share:.1%}",
            f"{min(sizes):,} to {max(sizes):,}",
        )
    share = listed_share(result.cases)
    seen = "not seen" if share is None else f"{share:.1%}"
    table.add_row("all", *_cells(result.score), seen, "", style="bold")
    console.print(table)
    layers = "  ".join(f"{layer}: {score.share:.0%}" for layer, score in result.by_layer().items())
    if layers:
        _say(console, f"lists that held the needle, by layer: {layers}")
    elif listed is not None:
        _say(console, "every key was attended: no prompt was longer than index_topk")
    _print_usage(console, result.usage)


def print_gsm8k(result: Gsm8kResult, title: str) -> None:
    """Both scores, tokens."""
    console = Console()
    _say(console, f"{title}, {result.num_shots} shots", style="bold")
    table = _table("score", "n", "right", "95 % interval")
    table.add_row("strict (#### x)", *_cells(result.strict))
    table.add_row("flexible (last number)", *_cells(result.flexible))
    console.print(table)
    _print_usage(console, result.usage)


def print_arithmetic(result: ArithmeticResult, title: str) -> None:
    """Scores by sign and digits, both scores overall, tokens."""
    console = Console()
    _say(console, title, style="bold")
    table = _table("sums", "n", "right", "95 % interval")
    for sign in SIGNS:
        for digits in DIGITS:
            score = result.cell(sign, digits)
            if score.num_cases:
                table.add_row(f"{SIGN_NAMES[sign]}, {digits}-digit", *_cells(score))
    table.add_row("all, flexible (last number)", *_cells(result.flexible), style="bold")
    table.add_row("all, strict (the number alone)", *_cells(result.strict))
    console.print(table)
    _print_usage(console, result.usage)


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _cells(score: Score) -> tuple[str, str, str]:
    low, high = score.interval
    return str(score.num_cases), f"{score.share:.1%}", f"{low:.1%} to {high:.1%}"


def _print_map(console: Console, title: str, grid: Grid, result: NeedleResult) -> None:
    """Depth down, length across."""
    _say(console, title, style="bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("depth", justify="right")
    for length in result.lengths:
        table.add_column(f"{length:,}", justify="right")
    for depth, shares in zip(result.depths, grid, strict=True):
        cells = [Text(f" {share:4.0%} ", style=f"black on {_shade(share)}") for share in shares]
        table.add_row(f"{depth:.0%}", *cells)
    console.print(table)
    console.print()


def _shade(share: float) -> str:
    return SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)]


def _print_usage(console: Console, usage: Usage) -> None:
    cut = f"; {usage.num_cut} answers ended by length" if usage.num_cut else ""
    _say(
        console,
        f"{usage.num_prompt_tokens:,} prompt tokens ({usage.num_cached_tokens:,} cached), "
        f"{usage.num_output_tokens:,} output tokens, {usage.seconds:.1f} s{cut}",
    )


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, highlight=False, markup=False)
