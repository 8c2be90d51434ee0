"""What a person sees while laws are tested: a bar in a terminal, a line per law elsewhere.

In:  reports (law, done, total); where laws run for so many minutes, a notice as each round begins.
     Then a terminal shows a second bar, of the time, and elsewhere only the first round has lines.
Out: on stderr, so that a command's output stays clean.
Not here: the laws, the table of results (verify.py).
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class LawDisplay:
    """A context whose `report` can be handed out as a progress callback."""

    def __init__(self, minutes: float | None = None) -> None:
        console = Console(stderr=True)
        self._minutes = minutes
        self._round = 1
        self._time: TaskID | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._law = ""
        self._began = time.monotonic()
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:<22}"),
                BarColumn(),
                TextColumn("{task.completed:.0f} of {task.total:.0f}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            if self._minutes is not None:
                self._time = self._bar.add_task("seconds", total=60.0 * self._minutes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, law: str, done: int, total: int) -> None:
        """`done` of `total` of a law; both may start again for its next part."""
        self._show_time()
        if self._bar is None:
            if law != self._law and self._round == 1:
                seconds = time.monotonic() - self._began
                print(f"testing {law} (at {seconds:.0f} s)", file=sys.stderr, flush=True)
        elif self._task is None or law != self._law:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(law, total=total, completed=done)
        else:
            self._bar.update(self._task, completed=done, total=total)
        self._law = law

    def begin_round(self, number: int, seconds_left: float) -> None:
        """Round `number`, from 1, begins."""
        self._round = number
        if number == 1:
            return
        text = f"round {number}, {seconds_left:.0f} s left"
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        elif self._time is not None:
            self._bar.update(self._time, description=f"seconds, round {number}")

    def _show_time(self) -> None:
        if self._bar is not None and self._time is not None:
            elapsed = self._bar.tasks[self._bar.task_ids.index(self._time)].elapsed or 0.0
            self._bar.update(self._time, completed=elapsed)
