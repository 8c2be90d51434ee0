"""What a person sees while a model is loading: a bar in a terminal, lines elsewhere.

In:  reports (stage, done, total) in any unit; bytes for stage "weights".
Out: on stderr, so that a command's output stays clean.
Not here: what is loaded.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_EVERY = 0.25  # of a stage, without a terminal


class LoadingDisplay:
    """A context whose `report` can be handed out as a progress callback."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%  {task.fields[amount]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        self._line(f"loading {self._title}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            seconds = time.monotonic() - self._began
            self._line(f"loaded {self._title} in {seconds:.1f} s")

    def report(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` of a stage."""
        total = max(total, 1)
        amount = _amount(stage, done, total)
        if self._bar is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(stage, total=total, amount=amount)
            self._bar.update(self._tasks[stage], completed=done, total=total, amount=amount)
            return
        share = done / total
        if share - self._printed.get(stage, -1.0) >= LINE_EVERY or (
            done >= total and self._printed.get(stage) != 1.0
        ):
            self._printed[stage] = share
            seconds = time.monotonic() - self._began
            self._line(f"  {stage} {share:.0%}{amount and ' '}{amount} at {seconds:.1f} s")

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _amount(stage: str, done: int, total: int) -> str:
    if stage == "weights":
        return f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"
    return "" if total == 1 else f"{done} of {total}"
