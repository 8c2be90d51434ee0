"""What an engine says of itself while it starts: lines for the log, before a weight is read.

In:  the resolved configuration, rows on the chosen providers.
Out: lines: what was found out rather than given, the memory plan, who serves each operator and why.
Not here: the same as a table (`gnomon explain`), stages and their seconds (the caller's progress).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnomon.engine.resolve import ResolvedConfig

FOUND = ("machine", "model")  # sources of values that nobody gave


def start_lines(
    resolved: ResolvedConfig, operators: Sequence[tuple[str, str, str, str]]
) -> Iterator[str]:
    """Module docstring; ``operators``: (operator, provider, reason, ...)."""
    for name, (value, source, reason) in resolved.table().items():
        if source in FOUND:
            yield f"{name} is {value} ({source}{reason and ': '}{reason})"
    for line in () if resolved.memory is None else resolved.memory.shown():
        yield f"memory: {line}"
    served: dict[tuple[str, str], list[str]] = {}
    for operator, provider, reason, *_ in operators:
        served.setdefault((provider, reason), []).append(operator)
    for (provider, reason), names in served.items():
        yield f"{provider} ({reason}) serves {'; '.join(names)}"
