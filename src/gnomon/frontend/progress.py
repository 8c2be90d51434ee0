"""A progress bar on a terminal, and silence everywhere else.

In:  a label, a total, whether it is wanted. Out: a context that gives `advance(count)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    label: str, total: int, *, is_wanted: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` are done, on stderr, if that is a terminal and it is wanted."""
    if not is_wanted or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda count: shown.advance(task, count) if count else None
